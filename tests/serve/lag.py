"""How late a server is: of its event loop from inside, or of ``/health`` from outside.

Something is due every few milliseconds, and how much later it happened is noted. While a loop is blocked all that falls
due meanwhile is late by what is left of the block, so a block weighs as long as it lasts; a probe that slept between
two looks would count it once, however long it was.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx2

PROMISED_S = 0.1
"""The 99th percentile that the server promises for its loop, whatever is sent."""
PERIOD_S = 0.005


@dataclass
class Lateness:
    """Seconds between when something was due and when it happened."""

    period_s: float = PERIOD_S
    late_s: list[float] = field(default_factory=list)
    due_s: float | None = None

    def note(self, now_s: float) -> float:
        """Record everything that was due until now; returns when the next is."""
        due = now_s if self.due_s is None else self.due_s
        while due <= now_s:
            self.late_s.append(now_s - due)
            due += self.period_s
        self.due_s = due
        return due

    def quantile(self, share: float) -> float:
        """Lateness that this share of all events does not exceed."""
        ordered = sorted(self.late_s)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    @property
    def p99_s(self) -> float:
        """99th percentile."""
        return self.quantile(0.99)

    def __str__(self) -> str:
        p50, p99, worst = (1e3 * self.quantile(share) for share in (0.5, 0.99, 1.0))
        return f"{len(self.late_s)} events, late by p50 {p50:.1f} ms, p99 {p99:.1f} ms, at most {worst:.1f} ms"


@contextmanager
def loop_lag(loop: asyncio.AbstractEventLoop) -> Iterator[Lateness]:
    """Lateness of a loop that runs in another thread, for the length of a block; read it after the block."""
    lateness = Lateness()

    async def tick() -> None:
        while True:
            await asyncio.sleep(max(lateness.note(time.perf_counter()) - time.perf_counter(), 0))

    async def last_look() -> None:
        lateness.note(time.perf_counter())

    probe = asyncio.run_coroutine_threadsafe(tick(), loop)
    try:
        yield lateness
    finally:
        asyncio.run_coroutine_threadsafe(last_look(), loop).result(60)
        probe.cancel()


@contextmanager
def health_lag(url: str, period_s: float = 0.02) -> Iterator[Lateness]:
    """Lateness of the answers of ``/health``, which another process may give; read it after the block."""
    lateness, is_over = Lateness(period_s), threading.Event()

    def watch() -> None:
        with httpx2.Client(base_url=url, timeout=60) as http:
            http.get("/health").raise_for_status()  # connecting is not what is measured
            lateness.due_s = time.perf_counter()
            while not is_over.wait(max((lateness.due_s or 0) - time.perf_counter(), 0)):
                http.get("/health").raise_for_status()
                lateness.note(time.perf_counter())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lateness
    finally:
        is_over.set()
        thread.join()


def calmest(measure: Callable[[], Lateness], attempts: int = 3) -> Lateness:
    """The least late of a few measurements, the first that keeps the promise if one does.

    Other programs on the machine only ever make a loop later, so one measurement that keeps the promise shows that the
    server does; what the server itself holds up is late every time.
    """
    found = [measure()]
    while found[-1].p99_s > PROMISED_S and len(found) < attempts:
        found.append(measure())
    return min(found, key=lambda lateness: lateness.p99_s)
