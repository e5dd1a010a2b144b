"""A minute of training on the model that ships: gates that are nearer the top than the slow stream, and decode."""

from __future__ import annotations

from pathlib import Path

import pytest

import vivace
from benchmarks.exit_measures import velocities
from vivace.checkpoint.adapters import load_adapter
from vivace.configuration import build
from vivace.engine import SHIPPED
from vivace.methods.dynamic.drafter import DynamicConfig, DynamicWeights
from vivace.methods.dynamic.objective import RouterTraining
from vivace.prompts import packaged_prompts
from vivace.recipes.dynamic import DynamicRecipe
from vivace.recipes.regenerate import regenerated
from vivace.recipes.trainer import train_beside
from vivace.train.config import LoopConfig
from vivace.train.data import Rows
from vivace.train.optim import OptimiserConfig
from vivace.train.report import Lines

RECIPE = DynamicRecipe(
    kind="dynamic",
    loop=LoopConfig(steps=40, warmup_steps=5, hold=0.1, autocast=True, report_steps=10),
    optimiser=OptimiserConfig(adamw_rate=0.004),
    router_training=RouterTraining(epochs=4, positions=256),
    tokens_per_batch=512,
    held_back=12,
    router_rows=12,
    regenerate=72,
)


@pytest.mark.slow
@pytest.mark.skipif(not SHIPPED.is_dir(), reason="this installation carries no model")
def test_a_minute_brings_every_gate_nearer_than_the_slow_stream(tmp_path: Path) -> None:
    engine, notes = vivace.load(kernels="torch"), list[str]()
    prompts = packaged_prompts("e2e")[: RECIPE.regenerate]
    runs = train_beside(RECIPE, engine, prompts, tmp_path / "early", Lines(notes.append))
    assert [run.method for run in runs] == ["plain", "dynamic"]
    written, tensors = load_adapter(tmp_path / "early")
    weights = DynamicWeights(build(DynamicConfig, written["config"]), engine.model.config)
    weights.load(tensors)
    weights.gates.to(engine.model.dtype)
    texts = [str(prompt.request) for prompt in packaged_prompts("e2e")[-12:]]
    pairs = regenerated(engine, texts, tmp_path / "other.jsonl", notes.append)
    slow, fast = velocities(engine.model, weights.gates, Rows(engine.tokenizer, 256).batches(pairs, 512))
    for depth, stream in zip(weights.gates.config.layers, fast, strict=True):
        assert stream.agreement[-1] > slow.agreement[depth - 1], (depth, notes)
        assert stream.cosine[-1] > slow.cosine[depth - 1], depth
