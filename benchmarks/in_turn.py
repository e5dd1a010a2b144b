"""Drafters that are compared learn in turn from one file of a model's answers; each change of a recipe is a drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vivace.checkpoint.adapters import base_hash
from vivace.engine import Engine
from vivace.recipes.answers import read_answers, without_writing
from vivace.recipes.frozen import FrozenRecipe
from vivace.recipes.kinds import recipe_named, recipe_of
from vivace.recipes.reading import override
from vivace.recipes.trainer import train_in_turn
from vivace.train.report import Lines, Report


def learn_in_turn(engine: Engine, answers: Path, drafters: Mapping[Path, tuple[str, Sequence[str]]]) -> list[Path]:
    """Train the drafters that have no weights yet, and return their folders.

    Args:
        engine: the frozen decoder, on PyTorch's kernels.
        answers: the file that all learn from.
        drafters: by folder of the result, the name of a recipe and the changes to it.
    """
    waiting = {out: _recipe(*drafter) for out, drafter in drafters.items() if not (out / "config.json").is_file()}
    read = read_answers(answers, base_hash(engine.folder))
    if waiting:
        train_in_turn(waiting, engine, read, _report)
    return list(waiting)


def _recipe(name: str, changes: Sequence[str]) -> FrozenRecipe:
    values = without_writing(override(recipe_named(name), changes), changes, has_data=False)
    found = recipe_of(values)
    assert isinstance(found, FrozenRecipe)
    return found


def _report(out: Path) -> Report:
    return Lines(lambda text: print(f"{out.name}: {text}", flush=True))
