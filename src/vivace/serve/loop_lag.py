"""Measures how late the event loop is: every stream, health check and refusal waits that long.

An event is due every period, and its delay is counted. While the loop is blocked, every event that becomes due is late
by what remains of the block, so a block counts for as long as it lasts. A probe that slept and then looked would count
a block of a minute once (coordinated omission, Tene 2013).
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left

PERIOD_S = 0.02
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds in seconds; the server is built to keep 99 of 100 delays below .1."""


class LoopLag:
    """A histogram of delays, filled by ``run`` on the loop that it measures."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self.period_s = period_s
        self.counts = [0] * (len(BUCKETS) + 1)
        """Number of events per bucket; those above the last bound have a bucket of their own."""
        self.sum_s = 0.0
        self.worst_s = 0.0

    def note(self, due_s: float, now_s: float) -> float:
        """Count all events that were due from ``due_s`` until now; return when the next one is due."""
        while due_s <= now_s:
            late_s = now_s - due_s
            self.counts[bisect_left(BUCKETS, late_s)] += 1
            self.sum_s += late_s
            self.worst_s = max(self.worst_s, late_s)
            due_s += self.period_s
        return due_s

    async def run(self) -> None:
        """Measure the lateness of the running event loop every period until cancelled."""
        due_s = time.perf_counter() + self.period_s
        while True:
            await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
            due_s = self.note(due_s, time.perf_counter())

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of events up to it), as Prometheus has them."""
        found, total = [], 0
        for end, count in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            total += count
            found.append((end, float(total)))
        return found
