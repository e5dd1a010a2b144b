"""The benchmark of LoRAs counts what it says, and texts of a batch are those written alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.adapters import Contest, measure
from tests.tiny_checkpoints import make_checkpoint


def test_every_way_is_measured(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base")
    asked = argparse.Namespace(
        count=3,
        rank=2,
        method="plain",
        tokens=6,
        repeats=1,
        kernels="auto",
        weights="bf16",
        peft=False,
        llama_cpp=False,
    )
    report = measure(base, "bf16", asked)
    assert set(report["tokens_per_s"]) == {
        *("one on the base", "one with a LoRA", "all on the base", "all with LoRAs", "one after another"),
    }
    assert set(report["ratios"]) == {"one", "all", "batch"}
    assert report["num_different"] == 0
    assert report["setting"]["adapter_bytes"] > report["setting"]["factor_bytes"] > 0


def test_each_prompt_has_its_own(tmp_path: Path) -> None:
    ways = Contest.__new__(Contest)
    ways.prompts, ways.names = ["a", "b"], ["x", "y"]
    assert ways.ways()["all with LoRAs"] == [(["a", "b"], ["x", "y"])]
    assert ways.ways()["one after another"] == [(["a"], ["x"]), (["b"], ["y"])]
