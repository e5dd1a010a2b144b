"""How late a server is: something is due every few milliseconds, and how much later it happened is noted.

While a loop is blocked all that falls due meanwhile is late by what is left of the block, so a block weighs as long as
it lasts; a probe that slept between two looks would count it once, however long it was.

As a program, ``python -m benchmarks.lateness URL``, it asks ``/health`` until its standard input ends and then writes
``[seconds late, ...]``: a process of its own is held up by nothing that other clients do.
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
def health_lag(url: str, period_s: float = 0.02) -> Iterator[Lateness]:
    """Lateness of the answers of ``/health``, which another process may give; read it after the block."""
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
    connection.request("GET", "/health")
    reply = connection.getresponse()
    reply.read()
    if reply.status != 200:
        raise RuntimeError(f"/health answered {reply.status}")


def main() -> None:
    """Watch until standard input ends, then write what was seen."""
    with health_lag(sys.argv[1]) as lateness:
        sys.stdin.read()
    json.dump([round(late_s, 6) for late_s in lateness.late_s], sys.stdout)


if __name__ == "__main__":
    main()
