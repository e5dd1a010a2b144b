"""``vivace train``: train what a recipe describes, on a base model and prompt files, and measure the result.

There are four kinds, each with rules of its own about flags: the scores of prompt pruning, a guard, weights beside a
model that stays as it is (``train_beside.py``), and all weights of a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.cli.guard import GUARD, train_guard
from vivace.cli.lazy import LAZY, train_lazy
from vivace.cli.loading import open_engine
from vivace.cli.train_beside import train_beside_model
from vivace.cli.train_flags import TrainFlags
from vivace.errors import ConfigError

if TYPE_CHECKING:
    from vivace.recipes.decoder import WholeRecipe
    from vivace.recipes.seq2seq import Seq2SeqRecipe


@options.grouped
def train(
    *,
    recipe: Annotated[
        str,
        typer.Argument(help="A recipe file (YAML or JSON), one that ships, a method, lazy or guard."),
    ],
    changes: Annotated[
        list[str] | None, typer.Argument(help="Changes to the recipe, such as loop.minutes=5.", metavar="KEY=VALUE...")
    ] = None,
    flags: TrainFlags,
) -> None:
    """Train what a recipe describes. It can be interrupted at any time; the same command continues."""
    changed = changes or []
    if recipe in (LAZY, GUARD):
        if flags.is_dry:
            raise ConfigError(f"--dry-run is for recipes; {recipe} takes a few minutes and little memory")
        if flags.answers is not None:
            raise ConfigError(f"--answers is for weights that learn the model's own text; {recipe} learns from --data")
        (_train_lazy if recipe == LAZY else _train_guard)(changed, flags)
        return
    from vivace.recipes.decoder import WholeRecipe
    from vivace.recipes.kinds import recipe_named, recipe_of
    from vivace.recipes.reading import override
    from vivace.recipes.seq2seq import Seq2SeqRecipe

    values = override(recipe_named(recipe), changed)
    found = recipe_of(values)
    if isinstance(found, (WholeRecipe, Seq2SeqRecipe)):
        _train_whole(found, str(values["kind"]), flags)
    else:
        train_beside_model(values, changed, flags)


def _train_lazy(changes: list[str], flags: TrainFlags) -> None:
    """Learn what pruned prompts are scored with."""
    if flags.reads_store:
        raise ConfigError("what prompts are scored with is learnt in memory; leave out --memory and --reader")
    _refuse_adapter(flags)
    _refuse_curves(flags)
    load = options.LoadFlags(device=flags.device, dtype=flags.dtype, ignore_config_key=flags.ignore_config_key)
    out, engine = flags.folder(LAZY), open_engine(flags.model, (), load)
    report = flags.report()
    train_lazy(engine, changes, flags.prompts(), out, flags.minutes, report, as_json=flags.as_json)


def _train_guard(changes: list[str], flags: TrainFlags) -> None:
    """Learn what judges prompts or answers."""
    if flags.reads_store or flags.minutes is not None:
        raise ConfigError(
            "a guard is learnt in memory and takes what it takes; leave out --memory, --reader, --minutes"
        )
    _refuse_adapter(flags)
    _refuse_curves(flags)
    out, report = flags.folder(GUARD), flags.report()
    engine = open_engine(flags.model, (), flags.load_flags())
    train_guard(engine, changes, flags.prompts(), out, report, as_json=flags.as_json)


def _refuse_adapter(flags: TrainFlags) -> None:
    """Refuse a LoRA where nothing is trained over one."""
    if flags.adapter is not None:
        raise ConfigError("--adapter is for the weights of a method that drafts; leave it out")


def _refuse_curves(flags: TrainFlags) -> None:
    """Refuse curves where nothing is reported step by step."""
    if flags.tensorboard is not None:
        raise ConfigError("--tensorboard draws the curves of trainings in steps; leave it out")


def _train_whole(recipe: WholeRecipe | Seq2SeqRecipe, kind: str, flags: TrainFlags) -> None:
    """Train all weights of a model, a new one or the base's."""
    _check_whole(kind, flags)
    if flags.out is None:
        raise ConfigError("say where the result goes: --out DIR")
    from vivace.recipes.seq2seq import Seq2SeqRecipe
    from vivace.recipes.seq2seq_trainer import train_seq2seq
    from vivace.recipes.whole_trainer import train_whole

    prompts, report = flags.prompts(), flags.report()
    if isinstance(recipe, Seq2SeqRecipe):
        result = train_seq2seq(recipe, prompts, flags.out, report, flags.model, flags.device)
    else:
        result = train_whole(recipe, prompts, flags.out, report, flags.model, flags.device)
    if flags.as_json:
        held_back = dict(result.held_back)
        console.json({"out": str(flags.out), "steps": result.progress.step, "held_back": held_back})


def _check_whole(kind: str, flags: TrainFlags) -> None:
    """Refuse flags that have no effect where all weights of a model are trained."""
    _refuse_adapter(flags)
    if flags.is_dry:
        raise ConfigError(
            f"--dry-run is for weights beside a model as it is, not for a training of a whole model ({kind}); "
            "leave it out"
        )
    if flags.answers is not None:
        raise ConfigError(f"--answers is for weights beside a model; {kind} learns from --data")
    if not flags.data:
        raise ConfigError("say what to learn from: --data FILE (make one with `vivace data`)")
    if flags.minutes is not None:
        raise ConfigError("--minutes is for weights beside a model; a decoder's stages have minutes of their own")
    if flags.reads_store:
        raise ConfigError(f"all weights of a model learn in memory ({kind}); leave out --memory and --reader")
    if flags.dtype != "auto":
        raise ConfigError("all weights of a model are trained in its own dtype; leave out --dtype")
    if flags.ignore_config_key:
        raise ConfigError("the trained model keeps config.json: remove the key there, not by --ignore-config-key")
