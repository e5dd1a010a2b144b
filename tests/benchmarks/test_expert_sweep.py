"""The sweep of machines: every cell is there, no gain passes its bound, and the picture is the same twice."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks import expert_sweep
from benchmarks.expert_simulator import Machine
from benchmarks.expert_traces import Prediction, Trace, Visit

LAYERS, EXPERTS = 4, 6


def trace() -> Trace:
    draw, made = random.Random(0), Trace(LAYERS)
    made.visits.append(Visit(0, True, tuple(range(EXPERTS))))
    for clock in range(LAYERS, 16 * LAYERS):
        chosen = tuple(sorted(draw.sample(range(EXPERTS), 2)))
        made.predictions.append(Prediction(clock - 2, clock, (*chosen, 5)))
        made.visits.append(Visit(clock, False, chosen))
    return made


def test_every_cell(tmp_path: Path) -> None:
    asked = expert_sweep.asked_for(trace(), 2)
    assert all(len(hint.likely) == 2 for hint in asked.predictions)
    rows = expert_sweep.sweep(asked, LAYERS * EXPERTS, Machine(1e9, 1_000_000, 1, 50e-6, 20e-6, chunk_bytes=1 << 20))
    assert len(rows) == len(expert_sweep.SHARES) * len(expert_sweep.BANDWIDTHS)
    for row in rows:
        assert row["over_lru"] <= row["bound_over_lru"] * 1.02
        assert row["of_oracle"] <= 1.02  # guesses come before the first layer, the oracle speaks when it has begun
    rates = expert_sweep.sweep_rates(
        {"1.5": trace(), "2": trace()}, LAYERS * EXPERTS, Machine(1e9, 1_000_000, 1, 50e-6, 20e-6, chunk_bytes=1 << 20)
    )
    assert len(rates) == 2 * len(expert_sweep.COUNTS) * len(expert_sweep.RATE_SHARES) * len(expert_sweep.BANDWIDTHS)
    half = {row["gb_per_s"]: row for row in rows if row["share"] == expert_sweep.RATE_SHARES[-1]}
    told = [row for row in rates if (row["rate"], row["count"], row["share"]) == ("2", 2, 0.5)]
    assert all(row["over_on_demand"] == half[row["gb_per_s"]]["over_on_demand"] for row in told), "the same trace"
    for name in ("a.svg", "b.svg"):
        expert_sweep.draw(rows, rates, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
