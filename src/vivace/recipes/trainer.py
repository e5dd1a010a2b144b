"""The trainer of every method beside a frozen decoder: it divides the rows, trains, saves and times the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from vivace.checkpoint.adapters import base_hash
from vivace.engine import Engine
from vivace.evaluate.benchmark import Run
from vivace.prompts import Prompt
from vivace.recipes.answers import AnswersFile
from vivace.recipes.frozen import FrozenRecipe, TrainContext
from vivace.train.config import TrainConfig
from vivace.train.loop import fit
from vivace.train.report import Report


def train_beside(
    recipe: FrozenRecipe,
    engine: Engine,
    prompts: Sequence[Prompt],
    out: Path,
    report: Report,
    *,
    answers: AnswersFile | None = None,
    is_timed: bool = True,
) -> list[Run]:
    """Train the weights of a method, save them and time decoding with them.

    Args:
        recipe: what to train and how.
        engine: the frozen decoder, on PyTorch's kernels.
        prompts: rows with references (rows that are regenerated need none).
        out: folder of the result; a run that was killed is continued there. Snapshots and regenerated answers are kept
            in ``<out>/run``.
        report: receives progress.
        answers: text of the decoder's own that another run had written, and that is learnt from instead of prompts.
        is_timed: whether decoding is timed afterwards; otherwise there are no timings.

    Returns:
        Timings of plain decoding and of the new method on held-back prompts.

    Raises:
        ConfigError: there are too few rows, there is other text beside ``answers``, the recipe does not fit the base,
            or ``out`` is the base's own folder.
        CapacityError: the training needs more memory than is free.
        UnsupportedError: the base's weights are packed for native kernels.
    """
    context = TrainContext.of(recipe, engine, prompts, out, report, answers)
    torch.manual_seed(recipe.seed)
    trainable = recipe.begin(context)
    base = base_hash(engine.folder)
    if trainable.objective is not None:
        context.require_memory(trainable.objective, trainable.depth)
        config = TrainConfig(recipe.loop, recipe.optimiser, recipe.seed, context.plan_text(base))
        fit(engine.model, trainable.objective, context.data(), config, folder=out / "run", report=report)
    saved = trainable.save(out, base)
    report.note(f"saved {saved.what} to {out}{saved.note}")
    return context.timed(saved) if is_timed else []
