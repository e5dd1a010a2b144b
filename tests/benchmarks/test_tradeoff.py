"""Everything that leaves early, and what does not, in one table and one picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import exit_plots, tradeoff
from tests.tiny_checkpoints import make_adapter, make_checkpoint
from vivace import load
from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.checkpoint.load import load_config
from vivace.decode.depth import ExitPlan, ExitThresholds
from vivace.methods.dynamic.drafter import DynamicConfig, DynamicWeights
from vivace.methods.dynamic.gates import GateConfig, GatesConfig
from vivace.methods.dynamic.router import RouterConfig
from vivace.prompts import Prompt


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four layers, an accelerator, and gates at one and two of which the lower lets everything through."""
    base = make_checkpoint(tmp_path / "base", layers=4)
    make_adapter(base / "adapters" / "multirate", base)
    config = DynamicConfig(
        GatesConfig((GateConfig(1), GateConfig(2)), rank=2, bottleneck=4), RouterConfig("linear", stride=1)
    )
    torch.manual_seed(0)
    tensors = {n: v.to(torch.float32) for n, v in DynamicWeights(config, load_config(base)).tensors().items()}
    plan = ExitPlan((ExitThresholds(0.9, (-1.0, None)), ExitThresholds(0.98, (None, None))))
    save_adapter(base / "adapters" / "dynamic", "dynamic", base_hash(base), asdict(plan), asdict(config), tensors)
    return base


def test_all_ways_stand_side_by_side(folder: Path, tmp_path: Path) -> None:
    engine = load(folder)
    prompts = [Prompt(f"Write SQL for: {name}", (f"SELECT {name} ;",), "wikisql") for name in "ab"]
    players, missing = tradeoff.players(engine, None, 6)
    points = tradeoff.measure(engine, players, prompts, 1)
    found = {one.method: one for one in points}
    assert next(iter(found)) == "plain"
    assert {"calm", "lite"} <= set(missing)
    assert {"multirate", "dynamic@0.9", "dynamic@0.98", "exit at 1", "exit at 3", "accelerated exit at 2"} <= set(found)
    assert (found["plain"].layer_passes, found["plain"].read_share) == (4.0, 1.0)
    assert found["dynamic@0.98"].num_different == 0, "all gates are shut"
    assert found["dynamic@0.9"].early_exit_share is not None
    assert found["exit at 1"].layer_passes == 1.0
    assert found["accelerated exit at 1"].layer_passes == 2.0, "a row and its companion"
    assert found["exit at 1"].read_share < found["exit at 3"].read_share < 1
    assert found["multirate"].lossless
    assert found["multirate"].num_different == 0
    report = {"points": [asdict(one) for one in points], "envelope": ["plain"], "num_prompts": 2, "prompts": "made-up"}
    shown = tradeoff.table(report)
    assert all(name in shown for name in found)
    pictures = [exit_plots.draw_tradeoff(report, tmp_path / name).read_bytes() for name in ("a.svg", "b.svg")]
    assert pictures[0] == pictures[1]
    assert b"accelerated exit at" in pictures[0]


def test_speeds_come_from_the_report_that_was_timed() -> None:
    def of(speed: float, *methods: str, model: str = "m") -> dict[str, Any]:
        points = [
            {"method": name, "quality": speed, "speedup": speed, "speedup_interval": [speed] * 2} for name in methods
        ]
        return {"points": points, "model": model, "num_prompts": int(10 * speed), "provenance": {}, "left_out": []}

    merged = tradeoff.with_speeds(of(1.0, "plain", "calm"), of(2.0, "plain", "calm", "lite"))
    assert [row["speedup"] for row in merged["points"]] == [2.0, 2.0]
    assert [row["quality"] for row in merged["points"]] == [1.0, 1.0]
    assert (merged["num_prompts"], merged["num_timed"]) == (10, 20)
    with pytest.raises(ValueError, match="not timed on m: calm"):
        tradeoff.with_speeds(of(1.0, "plain", "calm"), of(2.0, "plain"))
    with pytest.raises(ValueError, match="any method"):
        tradeoff.with_speeds(of(1.0, "plain"), of(2.0, "plain", model="other"))
