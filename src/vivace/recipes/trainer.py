"""The trainer of everything beside a frozen decoder: rows, memory, loop, saving and timing, whatever the recipe is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from vivace.checkpoint.adapters import base_hash
from vivace.engine import Engine
from vivace.evaluate.benchmark import Run
from vivace.prompts import Prompt
from vivace.recipes.frozen import FrozenRecipe, TrainContext
from vivace.train.config import TrainConfig
from vivace.train.loop import fit
from vivace.train.report import Report


def train_beside(
    recipe: FrozenRecipe, engine: Engine, prompts: Sequence[Prompt], out: Path, report: Report
) -> list[Run]:
    """Train, save and time what a recipe describes.

    Args:
        recipe: what to train and how.
        engine: the frozen decoder, with torch's kernels.
        prompts: rows with references (those that are regenerated need none).
        out: folder of the result; a run that was killed there goes on. Snapshots, regenerated answers and whatever
            else it needs for that are in ``<out>/run``.
        report: hears about it.

    Returns:
        Plain decoding and the new method on held-back prompts.

    Raises:
        ConfigError: too few rows, a recipe that does not fit the base, or ``out`` is the base's own folder.
        CapacityError: not enough memory.
        UnsupportedError: the base's weights are packed.
    """
    context = TrainContext.of(recipe, engine, prompts, out, report)
    torch.manual_seed(recipe.seed)
    trainable = recipe.begin(context)
    base = base_hash(engine.folder)
    if trainable.objective is not None:
        context.require_memory(trainable.objective, trainable.depth)
        config = TrainConfig(recipe.loop, recipe.optimiser, recipe.seed, context.plan_text(base))
        fit(engine.model, trainable.objective, context.data(), config, folder=out / "run", report=report)
    saved = trainable.save(out, base)
    report.note(f"saved {saved.what} to {out}{saved.note}")
    return context.timed(saved)
