"""The share of the machine that other processes used during a measurement, which is stored with its results.

A native pass waits for the last of its threads, so one core that another process uses for a while delays all of them.
Drafting methods, whose passes are many and short, lose more by it than plain decoding does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")


@dataclass
class Others:
    """The result of `watched_others`."""

    cpu_share: float | None = None
    """Share of all cores' time used by other processes; None if the system does not report it."""


@contextmanager
def watched_others() -> Iterator[Others]:
    """Measure the processor time of other processes during a block.

    Yields:
        Others: its ``cpu_share`` is set when the block ends.
    """
    others = Others()
    busy, own, begun = _busy_s(), _own_s(), time.perf_counter()
    yield others
    if busy is not None:
        elapsed = (time.perf_counter() - begun) * (os.cpu_count() or 1)
        others.cpu_share = max(0.0, (_busy_s() or busy) - busy - (_own_s() - own)) / elapsed if elapsed else 0.0


def _busy_s() -> float | None:
    """Return the seconds that all cores have worked since the start: user, nice, system, interrupts and stolen by a
    host.
    """
    if not _STAT.is_file():
        return None
    user, nice, system, _idle, _wait, irq, soft, steal = map(int, _STAT.read_text().split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])
