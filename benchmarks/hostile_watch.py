"""Observing a server under attack: its metrics, its memory, and its delay."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.lateness import PROMISED_S, Lateness

IDLE_WITHIN_S = 60.0


def get(url: str, key: str) -> httpx2.Response:
    """Return the reply to a request with an API key."""
    with httpx2.Client(verify=False, timeout=60, headers={"Authorization": f"Bearer {key}"}) as http:
        return http.get(url).raise_for_status()


class Metrics:
    """The content of ``/metrics`` at one moment."""

    def __init__(self, url: str, key: str) -> None:
        """Read the page with an API key."""
        text = get(f"{url}/metrics", key).text
        self.samples = [one for family in text_string_to_metric_families(text) for one in family.samples]

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the values of a metric by a label, summed over the other labels."""
        found: dict[str, float] = {}
        for sample in self.samples:
            if sample.name == name:
                key = sample.labels.get(label, "")
                found[key] = found.get(key, 0.0) + sample.value
        return found

    def value(self, name: str) -> float:
        """Return the sum of a metric."""
        return sum(self.by(name, "").values())


class Memory(threading.Thread):
    """A thread that records the resident memory of a process every second."""

    def __init__(self, process: int) -> None:
        """Prepare to observe a process."""
        super().__init__(daemon=True)
        self.mib: list[float] = []
        self._path = Path(f"/proc/{process}/status")
        self._is_over = threading.Event()

    def run(self) -> None:
        """Record until ``stop`` is called or the process has ended."""
        began = time.monotonic()
        while not self._is_over.wait(max(began + len(self.mib) - time.monotonic(), 0)):
            lines = self._path.read_text().splitlines()
            kib = next((line.split()[1] for line in lines if line.startswith("VmRSS")), None)
            if kib is None:
                return
            self.mib.append(round(int(kib) / 1024, 1))

    def stop(self) -> None:
        """Stop recording."""
        self._is_over.set()
        self.join()


@contextmanager
def health_probe(url: str) -> Iterator[Lateness]:
    """Measure the delay of ``/health`` from a separate process; the result is complete after the block."""
    command, found = [sys.executable, "-m", "benchmarks.lateness", url], Lateness(0.02)
    probe = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield found
    finally:
        said, _ = probe.communicate(timeout=120)
    found.late_s += json.loads(said)


def wait_idle(url: str, key: str) -> bool:
    """Whether nothing runs or waits within a minute."""
    until = time.monotonic() + IDLE_WITHIN_S
    while time.monotonic() < until:
        now = Metrics(url, key)
        if now.value("vivace_num_requests_running") == now.value("vivace_num_requests_waiting") == 0:
            return True
        time.sleep(0.2)
    return False


def loop_lag(before: Metrics, after: Metrics) -> dict[str, Any]:
    """Quantiles of the loop's lateness meanwhile: upper ends of the buckets they fall into."""
    name = "vivace_event_loop_lag_seconds_bucket"
    first, last = before.by(name, "le"), after.by(name, "le")
    counts = {end: last[end] - first[end] for end in sorted(last, key=float)}
    total = counts["+Inf"]

    def quantile(share: float) -> float:
        return next(float(end) for end, count in counts.items() if count >= share * total)

    return {
        "events": total,
        "p50_s": quantile(0.5),
        "p99_s": quantile(0.99),
        "share_on_time": counts[str(PROMISED_S)] / total,
        "max_s": after.value("vivace_event_loop_lag_worst_seconds"),
        "buckets": counts,
    }
