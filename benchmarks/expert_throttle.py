"""The kernel's throttle of block reads, as a clock: when does a read go that a control group slows down?

The kernel counts bytes in slices of a tenth of a second. What a slice allows is allowed at its begin, and what was not
used in a slice stays allowed in the next while reads follow each other by less than a slice: a device that pauses is
faster afterwards, which a channel of constant speed is not. After a longer pause counting starts anew. A read that
passes the allowance waits for the end of the slice and for its bytes beyond it (``block/blk-throttle.c``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor

SLICE_S = 0.1
"""Seconds of a slice where the kernel ticks a hundred times a second or oftener."""


@dataclass
class Throttle:
    """One direction of one device of a control group."""

    bytes_per_s: float
    slice_s: float = SLICE_S
    start: float = 0.0
    end: float = -1.0
    used: float = 0.0
    """Bytes that were read since ``start``."""

    def leave(self, now: float, size: int) -> float:
        """Count a read that is asked for at ``now``, after all earlier ones, and return when it may go."""
        if now > self.end:
            self.start, self.used = now, 0.0
        elapsed = now - self.start
        rounded = self.slice_s * max(1, ceil(elapsed / self.slice_s - 1e-9))
        beyond = self.used + size - self.bytes_per_s * rounded
        gone = now if beyond <= 0 else self.start + rounded + beyond / self.bytes_per_s
        self.used += size
        self.end = self.slice_s * ceil(gone / self.slice_s + 1)  # the kernel rounds up to whole slices of its clock
        self._trim(gone)
        return gone

    def _trim(self, now: float) -> None:
        """Forget whole slices that are over, but for the last."""
        past = floor((now - self.start) / self.slice_s + 1e-9) - 1
        if past > 0:
            self.start += past * self.slice_s
            self.used = max(0.0, self.used - past * self.slice_s * self.bytes_per_s)
