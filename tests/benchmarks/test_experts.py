"""The benchmark of experts from disk: reads that are slowed down, and how far."""

from __future__ import annotations

import pytest

from benchmarks.experts import equal_pace, pace
from tests.benchmarks.test_expert_sweep import LAYERS, trace

SIZE, COMPUTE_S = 1_000_000, 0.004


def test_the_pace_at_which_loads_take_the_compute_time() -> None:
    none = equal_pace(trace(), 1, SIZE, COMPUTE_S)
    assert none == pytest.approx(2 * LAYERS * SIZE / COMPUTE_S), "without room every chosen expert is a load"
    some = equal_pace(trace(), 12, SIZE, COMPUTE_S)
    assert 0 < some < none
    assert equal_pace(trace(), 12, SIZE, 2 * COMPUTE_S) == some / 2
    assert pace("equal") == "equal"
    assert pace("0.5") == 0.5
