"""The trainer of every method beside a frozen decoder: it divides the rows, trains, saves and times the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from vivace.checkpoint.adapters import base_hash
from vivace.engine import Engine
from vivace.errors import ConfigError, UnsupportedError
from vivace.evaluate.benchmark import Run
from vivace.kernels.heap import keep_little
from vivace.prompts import Prompt
from vivace.recipes.answers import AnswersFile
from vivace.recipes.frozen import FrozenRecipe, SavedTraining, Trainable, TrainContext
from vivace.recipes.regenerate import OverLora
from vivace.train.config import TrainConfig
from vivace.train.distillation import SharedPasses
from vivace.train.loop import Training, fit, fit_in_turn
from vivace.train.report import Report


def train_beside(
    recipe: FrozenRecipe,
    engine: Engine,
    prompts: Sequence[Prompt],
    out: Path,
    report: Report,
    *,
    answers: AnswersFile | None = None,
    over: OverLora | None = None,
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
        over: the LoRA that the decoder wears (``over_lora.py``); a run goes on over the same alone.
        is_timed: whether decoding is timed afterwards; otherwise there are no timings.

    Returns:
        Timings of plain decoding and of the new method on held-back prompts.

    Raises:
        ConfigError: there are too few rows, there is other text beside ``answers``, the recipe does not fit the base,
            or ``out`` is the base's own folder.
        CapacityError: the training needs more memory than is free.
        UnsupportedError: the base's weights are packed for native kernels.
    """
    keep_little()
    context = TrainContext.of(recipe, engine, prompts, out, report, answers, over)
    base = base_hash(engine.folder)
    trainable, config = _begun(context, base)
    if trainable.objective is not None:
        fit(engine.model, trainable.objective, context.data(), config, folder=out / "run", report=report)
    saved = _saved(trainable, out, base)
    return context.timed(saved) if is_timed else []


def train_in_turn(
    recipes: Mapping[Path, FrozenRecipe], engine: Engine, answers: AnswersFile, report: Callable[[Path], Report]
) -> None:
    """Train the weights of several methods beside one decoder, step by step in turn on the same batches.

    The decoder's pass over a batch is made once for all of them, and each gets the weights that ``train_beside`` would
    give it in as many steps. So drafters can be compared that learn from the same text, in the time of little more
    than one of them.

    Args:
        recipes: what to train, by folder of the result; seed, held-back rows and sizes of batches are alike.
        engine: the frozen decoder, on PyTorch's kernels.
        answers: text of the decoder's own, which all learn from.
        report: returns what receives the progress of the training into a folder.

    Raises:
        ConfigError: batches would differ, or as ``train_beside``.
        UnsupportedError: a recipe trains nothing, or as ``train_beside``.
    """
    alike = {
        (one.seed, one.tokens_per_batch, one.longest, one.held_back, one.loop.autocast) for one in recipes.values()
    }
    if len(alike) > 1:
        raise ConfigError("trainings in turn need the same seed, tokens_per_batch, longest, held_back and autocast")
    if any(one.loop.accumulate > 1 for one in recipes.values()):
        raise ConfigError("trainings in turn learn from one batch a step: set loop.accumulate=1")
    keep_little()
    base, begun, trainings = base_hash(engine.folder), list[tuple[Path, Trainable]](), []
    for out, recipe in recipes.items():
        context = TrainContext.of(recipe, engine, [], out, report(out), answers)
        trainable, config = _begun(context, base)
        if trainable.objective is None:
            raise UnsupportedError(f"{recipe.kind} trains no weights, so it cannot take turns")
        begun.append((out, trainable))
        trainings.append(
            Training(engine.model, trainable.objective, context.data(), config, out / "run", context.report)
        )
    with SharedPasses() as passes:
        fit_in_turn(trainings, lambda: passes.saved_s)
    for out, trainable in begun:
        _saved(trainable, out, base)


def _begun(context: TrainContext, base: str) -> tuple[Trainable, TrainConfig]:
    """Return what is to be trained, for which there is memory, and the settings of its loop."""
    recipe = context.recipe
    torch.manual_seed(recipe.seed)
    trainable = recipe.begin(context)
    if trainable.objective is not None:
        context.require_memory(trainable)
    return trainable, TrainConfig(recipe.loop, recipe.optimiser, recipe.seed, context.plan_text(base))


def _saved(trainable: Trainable, out: Path, base: str) -> SavedTraining:
    """Write what was trained, and say so."""
    saved = trainable.save(out, base)
    trainable.context.report.note(f"saved {saved.what} to {out}{saved.note}")
    return saved
