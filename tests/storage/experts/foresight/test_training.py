"""Foresight from a recipe: trained, saved, decoded as a method, and refused where there are no experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import load_adapter
from vivace.checkpoint.upcycle import upcycle_checkpoint
from vivace.errors import ConfigError, UnsupportedError
from vivace.prompts import Prompt
from vivace.recipes.foresight import ForesightRecipe
from vivace.recipes.trainer import train_beside
from vivace.storage.experts.foresight.config import ForesightConfig, ForesightPlan
from vivace.train.config import LoopConfig
from vivace.train.report import Lines

WORDS = [Prompt(f"{a}{b}{a}", (f"{b}{a}{b}",)) for a in "abcdefgh" for b in "klmnopqr"]
RECIPE = ForesightRecipe(
    loop=LoopConfig(steps=6, warmup_steps=2, report_steps=3),
    adapter=ForesightConfig(rank=4, bottleneck=8, forecast=6),
    plan=ForesightPlan(count=3, leads=(1, 2)),
    tokens_per_batch=128,
    held_back=8,
)


def test_what_the_recipe_makes_comes_back_from_disk(tmp_path: Path) -> None:
    """A forecast and early routers without a residual of their own: no other weights are written, these are read."""
    mixture = upcycle_checkpoint(make_checkpoint(tmp_path / "dense", layers=4), tmp_path / "moe", num_experts=4)
    adapter = ForesightConfig(rate=None, forecast=6, leads=(1, 3))
    recipe = replace(RECIPE, adapter=adapter, plan=ForesightPlan(leads=(1, 2, 3)))
    notes: list[str] = []
    runs = train_beside(recipe, vivace.load(mixture, kernels="torch"), WORDS, tmp_path / "ahead", Lines(notes.append))
    assert runs == [], "nothing is left to load ahead where all experts are in memory"
    assert any("lead_3" in note and "forecast" in note for note in notes)
    found, tensors = load_adapter(tmp_path / "ahead")
    assert found["config"]["leads"] == [1, 3]
    assert set(tensors) == {"near", *(f"forecast.{name}" for name in ("down", "up", "inner", "outer"))}
    engine = vivace.load(mixture, adapters=tmp_path / "ahead")
    plain, seeing = (engine.generate("aka", method=method, max_new_tokens=6)[0] for method in ("plain", "foresight"))
    assert seeing.token_ids == plain.token_ids


def test_a_trained_foresight_decodes_the_same_text(tmp_path: Path) -> None:
    dense = make_checkpoint(tmp_path / "dense", layers=4)
    mixture = upcycle_checkpoint(dense, tmp_path / "moe", num_experts=4)
    notes: list[str] = []
    runs = train_beside(RECIPE, vivace.load(mixture, kernels="torch"), WORDS, tmp_path / "ahead", Lines(notes.append))
    assert runs == []
    found, tensors = load_adapter(tmp_path / "ahead")
    assert (found["kind"], found["config"]["rate"], found["plan"]["count"]) == ("foresight", 2, 3)
    assert found["plan"]["leads"] == [1, 2]
    assert tensors["scale"].shape == (4, 32)
    assert tensors["forecast.up"].shape == (2 * 4 * 4, 6)
    engine = vivace.load(mixture, adapters=tmp_path / "ahead")
    plain, seeing = (engine.generate("aka", method=method, max_new_tokens=24)[0] for method in ("plain", "foresight"))
    assert seeing.token_ids == plain.token_ids
    with pytest.raises(ConfigError, match="method foresight drafts nothing"):
        engine.generate("aka", method="foresight", num_draft_tokens=2)
    with pytest.raises(UnsupportedError, match="foresight is for mixtures of experts"):
        train_beside(RECIPE, vivace.load(dense, kernels="torch"), WORDS, tmp_path / "none", Lines(notes.append))
