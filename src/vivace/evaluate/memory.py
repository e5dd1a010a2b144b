"""Memory use: the peak of the process, and the part of it that a decoding method needs.

*Peak memory* is the resident memory of the whole process, or what was allocated on an accelerator. On Linux the
kernel's high-water mark is reset before the work (``/proc/self/clear_refs``); weights that are mapped from a file count
once they have been read. Other systems have no mark to reset, and nothing is reported.

In a benchmark all methods share one process, so its peak cannot be attributed to any of them.
*Holdings* are counted instead: the bytes of every tensor that a session refers to, as weights of the model, as
key/value cache, and as drafter (draft weights, quantized copies of the model's layers, a draft model and its cache).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from vivace.core.footprint import held_bytes
from vivace.core.seams import Drafter, DraftState
from vivace.decode.session import Session

_RESET_HIGH_WATER = "5"
_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass
class PeakMemory:
    """The result of `peak_memory`."""

    num_bytes: int | None = None
    """Peak in bytes, set when the work is done; None if it is unknown."""


@contextmanager
def peak_memory(device: torch.device) -> Iterator[PeakMemory]:
    """Measure the peak memory during a block.

    Args:
        device: device of the model; for a CPU the memory of the whole process is measured.

    Yields:
        PeakMemory: its ``num_bytes`` is set when the block ends, None if it is unknown.
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
        peak.num_bytes = _read_status("VmHWM")


def resident_memory() -> int | None:
    """Return the bytes of this process that are in memory now; None if the system does not report it."""
    return _read_status("VmRSS") if _STATUS.is_file() else None


@dataclass(frozen=True)
class Holdings:
    """Bytes of the tensors needed for answering; the memory of libraries and Python is not included."""

    weights: int
    """Weights of the model as they are in memory, packed or quantized."""
    cache: int
    """Keys and values of every slot, up to the longest answer."""
    drafter: int
    """Everything else that the session refers to: what the method needs and plain decoding does not."""


def holdings_of(session: Session, drafter: Drafter, state: DraftState) -> Holdings:
    """Count the memory that an answer needs; parts of the model that a drafter refers to count as the model's.

    Args:
        session: a session after its first steps, when the drafter has made the copies that it works with.
        drafter: the drafter of its requests.
        state: what the drafter remembers in that session, which forgets it with its last request.
    """
    weights, cache, besides = held_bytes(session.model, session.cache, (session, drafter, state))
    return Holdings(weights, cache, besides)


def _reset_high_water() -> bool:
    """Reset the kernel's high-water mark; return whether that is possible."""
    try:
        _CLEAR.write_text(_RESET_HIGH_WATER)
    except OSError:
        return False
    return True


def _read_status(key: str) -> int | None:
    """Return a value of ``/proc/self/status`` in bytes."""
    match = re.search(rf"{key}:\s+(\d+) kB", _STATUS.read_text())
    return int(match[1]) * 1024 if match else None
