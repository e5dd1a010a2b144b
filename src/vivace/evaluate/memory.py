"""Peak memory of a piece of work: resident memory of this process, or allocated memory of an accelerator.

On Linux the kernel's high-water mark is reset before the work (``/proc/self/clear_refs``); weights that are mapped
from a file count once they have been touched. Elsewhere there is no mark to reset and nothing is reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_RESET_HIGH_WATER = "5"
_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass
class PeakMemory:
    """Filled when the work is done."""

    num_bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[PeakMemory]:
    """Measure the highest memory during a block.

    Args:
        device: Where the model runs: a CPU's figure is that of the whole process.

    Yields:
        PeakMemory: its ``num_bytes`` is set when the block ends, None where it cannot be known.
    """
    peak = PeakMemory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.num_bytes = torch.cuda.max_memory_allocated(device)
        return
    can_reset = _reset_high_water()
    yield peak
    if can_reset:
        peak.num_bytes = _read_high_water()


def _reset_high_water() -> bool:
    try:
        _CLEAR.write_text(_RESET_HIGH_WATER)
    except OSError:
        return False
    return True


def _read_high_water() -> int | None:
    match = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    return int(match[1]) * 1024 if match else None
