"""From a recipe to an adapter that decodes: train, save, time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.engine import Engine
from vivace.evaluate.contest import Run
from vivace.prompts import Prompt
from vivace.train.config import TrainConfig
from vivace.train.loop import fit
from vivace.train.report import Report
from vivace.training.dynamic import DynamicRecipe
from vivace.training.foresight import ForesightRecipe
from vivace.training.frozen import FrozenRecipe, Ground
from vivace.training.multirate import MultirateRecipe
from vivace.training.multistream import MultistreamRecipe
from vivace.training.regenerate import as_it_decodes
from vivace.training.rivals import DeedRecipe, EagleRecipe, MedusaRecipe, UnoRecipe, common_recipe

RECIPES: dict[str, type[FrozenRecipe]] = {
    "multirate": MultirateRecipe,
    "dynamic": DynamicRecipe,
    "multistream": MultistreamRecipe,
    "medusa": MedusaRecipe,
    "eagle": EagleRecipe,
    "deed": DeedRecipe,
    "uno": UnoRecipe,
    "foresight": ForesightRecipe,
}
"""Kinds of adapters whose recipe says more than the common one, or has defaults of its own."""


def recipe_of(kind: str) -> type[FrozenRecipe]:
    """The recipe of a kind of adapter; the common one for a method whose spec names an objective and no more."""
    return RECIPES[kind] if kind in RECIPES else common_recipe(kind)


def train_adapter(
    recipe: FrozenRecipe, engine: Engine, prompts: Sequence[Prompt], out: Path, report: Report
) -> list[Run]:
    """Train, save and time an adapter.

    Args:
        recipe: what to train and how.
        engine: the frozen base, with torch's kernels.
        prompts: rows with references (those that are regenerated need none).
        out: folder of the adapter; a run that was killed there goes on. Snapshots, regenerated answers and whatever
            else it needs for that are in ``<out>/run``.
        report: hears about it.

    Returns:
        Plain decoding and the new method on held-back prompts.

    Raises:
        ConfigError: too few rows, a recipe that does not fit the base, or ``out`` is the base's own folder.
        CapacityError: not enough memory.
        UnsupportedError: the base's weights are packed.
    """
    ground = Ground.of(recipe, engine, prompts, out, report)
    torch.manual_seed(recipe.seed)
    trainee = recipe.begin(ground)
    ground.require_memory(trainee)
    base = base_hash(engine.folder)
    course = TrainConfig(recipe.loop, recipe.optimiser, recipe.seed, ground.plan_text(base))
    fit(engine.model, trainee.objective, ground.lessons(), course, folder=out / "run", report=report)
    outcome = trainee.finish()
    tensors = {name: value.to(engine.model.dtype) for name, value in outcome.tensors.items()}
    save_adapter(out, recipe.kind, base, asdict(outcome.plan), asdict(outcome.config), tensors)
    report.note(f"saved {sum(t.numel() for t in tensors.values()):,} weights to {out}{outcome.note}")
    return ground.timed(as_it_decodes(engine, {recipe.kind: out}), recipe.kind)
