"""Measure how late a server is: an event is due every few milliseconds, and its delay is recorded.

While a loop is blocked, every event that falls due is late by the rest of the block, so a block counts in proportion to
its length; a probe that sleeps between two measurements would count it once, however long it was.

As a program, ``python -m benchmarks.lateness URL`` requests ``/health`` until its standard input ends and then writes
``[seconds late, ...]``; a separate process is not delayed by other clients.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

PROMISED_S = 0.1
"""The 99th percentile that the server promises for its loop, whatever is sent."""
PERIOD_S = 0.005
"""Seconds between two events."""


@dataclass
class Lateness:
    """Seconds between the time when each event was due and when it happened."""

    period_s: float = PERIOD_S
    late_s: list[float] = field(default_factory=list)
    due_s: float | None = None

    def note(self, now_s: float) -> float:
        """Record all events that were due until now; return when the next one is due."""
        due = now_s if self.due_s is None else self.due_s
        while due <= now_s:
            self.late_s.append(now_s - due)
            due += self.period_s
        self.due_s = due
        return due

    def quantile(self, share: float) -> float:
        """Return the delay that this share of all events does not exceed."""
        ordered = sorted(self.late_s)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    @property
    def p99_s(self) -> float:
        """99th percentile of the delays."""
        return self.quantile(0.99)

    def __str__(self) -> str:
        p50, p99, worst = (1e3 * self.quantile(share) for share in (0.5, 0.99, 1.0))
        return f"{len(self.late_s)} events, late by p50 {p50:.1f} ms, p99 {p99:.1f} ms, at most {worst:.1f} ms"


@contextmanager
def health_lag(url: str, period_s: float = 0.02) -> Iterator[Lateness]:
    """Measure the delay of the answers of ``/health`` during a block, from a thread; the result is complete after the
    block.
    """
    lateness, is_over = Lateness(period_s), threading.Event()

    def watch() -> None:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        _look(connection)  # connecting is not what is measured
        lateness.due_s = time.perf_counter()
        while not is_over.wait(max((lateness.due_s or 0) - time.perf_counter(), 0)):
            _look(connection)
            lateness.note(time.perf_counter())
        connection.close()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lateness
    finally:
        is_over.set()
        thread.join()


def _look(connection: http.client.HTTPConnection) -> None:
    """Request ``/health`` once.

    Raises:
        RuntimeError: the status is not 200.
    """
    connection.request("GET", "/health")
    reply = connection.getresponse()
    reply.read()
    if reply.status != 200:
        raise RuntimeError(f"/health answered {reply.status}")


def main() -> None:
    """Measure until standard input ends, then write the delays."""
    with health_lag(sys.argv[1]) as lateness:
        sys.stdin.read()
    json.dump([round(late_s, 6) for late_s in lateness.late_s], sys.stdout)


if __name__ == "__main__":
    main()
