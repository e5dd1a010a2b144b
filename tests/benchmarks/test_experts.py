"""The benchmark of experts from disk: reads that are slowed down, and how far."""

from __future__ import annotations

import time

import pytest

from benchmarks.experts import PacedReader, equal_pace, pace
from tests.benchmarks.test_expert_sweep import LAYERS, trace

SIZE, COMPUTE_S = 1_000_000, 0.004


class Instant:
    name = "direct"

    def read(self, offset: int, into: memoryview) -> None:
        into[:] = bytes([offset % 256]) * len(into)

    def close(self) -> None:
        """Nothing is open."""


def test_reads_take_as_long_as_their_bytes() -> None:
    memory = memoryview(bytearray(50_000))
    reader = PacedReader(Instant())  # type: ignore[arg-type]
    reader.read(7, memory)
    reader.bytes_per_s = 1e6
    begun = time.perf_counter()
    for _ in range(2):
        reader.read(7, memory)
    assert time.perf_counter() - begun >= 0.1
    assert bytes(memory) == bytes([7]) * 50_000


def test_the_pace_at_which_loads_take_the_compute_time() -> None:
    none = equal_pace(trace(), 1, SIZE, COMPUTE_S)
    assert none == pytest.approx(2 * LAYERS * SIZE / COMPUTE_S), "without room every chosen expert is a load"
    some = equal_pace(trace(), 12, SIZE, COMPUTE_S)
    assert 0 < some < none
    assert equal_pace(trace(), 12, SIZE, 2 * COMPUTE_S) == some / 2
    assert pace("equal") == "equal"
    assert pace("0.5") == 0.5
