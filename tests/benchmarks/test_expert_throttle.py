"""The model of the kernel's throttle gives the times that a throttled group of control really took."""

from __future__ import annotations

import pytest

from benchmarks.expert_throttle import Throttle

MEASURED = (
    (0.0, 20, 200),
    (0.02, 20, 182),
    (0.05, 20, 150),
    (0.1, 20, 100),
    (0.2, 20, 214),
    (0.4, 20, 213),
    (0.2, 10, 112),
    (1.0, 10, 112),
    (0.2, 3, 2),
)
"""Seconds of pause, MiB of a burst after each, milliseconds of a burst at 100 MB/s;
direct reads, Linux 6.18, version 1. Medians of six."""


def bursts(pause: float, size: int) -> list[float]:
    """Return the milliseconds of some bursts of ``size`` MiB, each after a pause."""
    throttle, now, found = Throttle(100e6), 0.0, []
    for _ in range(8):
        begun = now = now + pause
        for _ in range(size):
            now = throttle.leave(now, 1 << 20) + 1e-4  # what the device itself takes
        found.append(1e3 * (now - begun))
    return sorted(found[2:])


@pytest.mark.parametrize(("pause", "size", "milliseconds"), MEASURED)
def test_pauses_are_credited_as_they_were_measured(pause: float, size: int, milliseconds: float) -> None:
    found = bursts(pause, size)
    assert found[len(found) // 2] == pytest.approx(milliseconds, abs=12)


def test_reads_without_pauses_have_the_stated_speed() -> None:
    throttle, now = Throttle(1e9), 0.0
    for _ in range(4000):
        now = throttle.leave(now, 1 << 18)
    assert now == pytest.approx(4000 * (1 << 18) / 1e9, rel=0.1)
