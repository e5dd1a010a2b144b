"""``vivace train`` for weights beside a model that stays as it is: a method's, a LoRA, soft prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.cli import options
from vivace.cli.bench import print_runs
from vivace.cli.console import console
from vivace.cli.dry_run import show_dry_run
from vivace.cli.loading import folder_of, open_engine
from vivace.cli.train_flags import TrainFlags
from vivace.errors import ConfigError

if TYPE_CHECKING:
    from vivace.recipes.answers import AnswersFile
    from vivace.recipes.frozen import FrozenRecipe


TEXT_LEARNERS = ("palette", "recover", "lora")
"""Kinds of training that learn from text in which nothing is asked."""


def train_beside_model(values: Mapping[str, Any], changes: Sequence[str], flags: TrainFlags) -> None:
    """Train weights beside a model, or say what that would need, and print the result.

    Args:
        values: the recipe with its changes.
        changes: changes of the user's.
        flags: the other flags of the command.

    Raises:
        ConfigError: flags contradict each other or the recipe.
    """
    from vivace.recipes.dry_run import TextToLearn

    _check_lora(values, flags)
    recipe, answers = _with_text(values, changes, flags)
    out = _place(recipe, flags)
    takes_text = recipe.kind in TEXT_LEARNERS and not recipe.regenerate
    prompts = flags.prompts(are_answered=bool(recipe.own_tokens), takes_text=takes_text)
    store = options.StoreFlags(flags.memory, flags.reader)
    if flags.is_dry:
        text = TextToLearn.of(recipe, prompts, answers)
        show_dry_run(recipe, flags.model, flags.load_flags(), store, text, out, as_json=flags.as_json)
        return
    from vivace.recipes.over_lora import wear
    from vivace.recipes.prompts import PromptsRecipe, train_pool
    from vivace.recipes.trainer import train_beside

    engine = open_engine(flags.model, (), flags.load_flags(), store)
    over = None if flags.lora is None else wear(engine, flags.lora)
    report = flags.report()
    if isinstance(recipe, PromptsRecipe):
        facts: dict[str, Any] = {"members": train_pool(recipe, engine, prompts, out, report, answers)}
    else:
        runs = train_beside(recipe, engine, prompts, out, report, answers=answers, over=over, is_timed=over is None)
        if runs and not flags.as_json:
            print_runs(runs)
        facts = {"runs": [asdict(run) for run in runs]}
    if flags.as_json:
        console.json({"out": str(out), **facts})


def _check_lora(values: Mapping[str, Any], flags: TrainFlags) -> None:
    """Refuse what cannot be trained over a LoRA, if one is given."""
    if flags.lora is None:
        return
    from vivace.recipes.kinds import recipe_of
    from vivace.recipes.over_lora import check_over_lora

    if flags.is_dry:
        raise ConfigError(
            "--dry-run is for weights beside a model as it is, not for a training over a LoRA; leave it out"
        )
    if flags.answers is not None:
        raise ConfigError("over a LoRA weights learn what it writes, and --answers are the base's; give --data")
    check_over_lora(recipe_of(values), flags.lora, has_data=bool(flags.data))


def _with_text(
    values: Mapping[str, Any], changes: Sequence[str], flags: TrainFlags
) -> tuple[FrozenRecipe, AnswersFile | None]:
    """Return the recipe with the text that it learns from and the minutes it has, and the answers that were given."""
    from vivace.checkpoint.adapters import base_hash
    from vivace.recipes.answers import read_answers, without_writing
    from vivace.recipes.frozen import FrozenRecipe
    from vivace.recipes.kinds import recipe_of
    from vivace.recipes.own_text import with_text, within
    from vivace.storage.store import is_store

    if flags.memory is not None and not is_store(folder_of(flags.model)):
        raise ConfigError("only a store learns within --memory; leave it out, or: vivace convert OUT --store")
    if flags.answers is None:
        answers, values = None, with_text(values, has_data=bool(flags.data))
    else:
        values = without_writing(values, changes, has_data=bool(flags.data))
        answers = read_answers(flags.answers, base_hash(folder_of(flags.model)))
    recipe = recipe_of(within(values, flags.minutes))
    assert isinstance(recipe, FrozenRecipe)
    if flags.minutes is not None and recipe.num_trainings > 1:  # they follow one another
        recipe = recipe_of(within(values, flags.minutes / recipe.num_trainings))
        assert isinstance(recipe, FrozenRecipe)
    return recipe, answers


def _place(recipe: FrozenRecipe, flags: TrainFlags) -> Path:
    """Return where the weights go: with those of a LoRA's own, into its folder; a LoRA or prompts need a name."""
    if flags.out is None and flags.lora is not None:
        return flags.lora / "drafting" / recipe.kind
    if flags.out is None and recipe.kind in ("lora", "prompts"):
        what = "LoRA goes: --out DIR; the name of the folder is what requests call it"
        raise ConfigError(f"say where the {what if recipe.kind == 'lora' else 'soft prompts go: --out DIR'}")
    return flags.folder(recipe.folder)
