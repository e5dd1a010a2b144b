"""``vivace train``: train what a recipe describes, on a base model and prompt files, and measure the result."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vivace.cli import options
from vivace.cli.bench import print_runs
from vivace.cli.console import console
from vivace.cli.dry_run import show_dry_run
from vivace.cli.guard import GUARD, train_guard
from vivace.cli.lazy import LAZY, train_lazy
from vivace.cli.loading import folder_of, open_engine
from vivace.errors import ConfigError
from vivace.prompts import Prompt, load_prompts

if TYPE_CHECKING:
    from vivace.recipes.decoder import WholeRecipe
    from vivace.recipes.seq2seq import Seq2SeqRecipe
    from vivace.train.report import Report


def train(
    recipe: Annotated[
        str,
        typer.Argument(help="A recipe file (YAML or JSON), one that ships, a method, lazy or guard."),
    ],
    changes: Annotated[
        list[str] | None, typer.Argument(help="Changes to the recipe, such as loop.minutes=5.", metavar="KEY=VALUE...")
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="A prompt file with references, repeatable.", metavar="FILE")
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            help="The model's own answers as another training had them written (OUT/run/own.jsonl); nothing else is "
            "learnt from.",
            metavar="FILE",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write (default: MODEL/adapters/METHOD); a killed run there goes on.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Minutes for everything; without, the recipe's.", metavar="N")
    ] = None,
    model: options.Model = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            help="LoRA over which a method's weights are trained; without --out they lie in it and are taken with it.",
            metavar="[NAME=]DIR",
        ),
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    memory: options.Memory = None,
    reader: options.Reader = "auto",
    ignore_config_key: options.IgnoreConfigKey = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Folder for TensorBoard curves; needs the extra 'train'.", metavar="DIR")
    ] = None,
    is_dry: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what the training would need (memory, minutes, files) and write nothing."),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Train what a recipe describes. It can be interrupted at any time; the same command continues."""
    from vivace.checkpoint.adapters import base_hash
    from vivace.recipes.answers import read_answers, without_writing
    from vivace.recipes.decoder import WholeRecipe
    from vivace.recipes.dry_run import TextToLearn
    from vivace.recipes.frozen import FrozenRecipe
    from vivace.recipes.kinds import recipe_named, recipe_of
    from vivace.recipes.own_text import with_text, within
    from vivace.recipes.prompts import PromptsRecipe, train_pool
    from vivace.recipes.reading import override
    from vivace.recipes.seq2seq import Seq2SeqRecipe
    from vivace.recipes.trainer import train_beside
    from vivace.storage.store import is_store

    if is_dry and recipe in (LAZY, GUARD):
        raise ConfigError(f"--dry-run is for recipes; {recipe} takes a few minutes and little memory")
    if answers is not None and recipe in (LAZY, GUARD):
        raise ConfigError(f"--answers is for weights that learn the model's own text; {recipe} learns from --data")
    if recipe == LAZY:
        if (memory, reader) != (None, "auto"):
            raise ConfigError("what prompts are scored with is learnt in memory; leave out --memory and --reader")
        load = options.LoadFlags(device=device, dtype=dtype, ignore_config_key=ignore_config_key)
        place, engine = out or _place_of(model, LAZY), open_engine(model, (), load)
        report = _report(tensorboard)
        train_lazy(engine, changes or [], _rows(data or []), place, minutes, report, as_json=as_json)
        return
    if recipe == GUARD:
        if (memory, reader, minutes) != (None, "auto", None):
            raise ConfigError(
                "a guard is learnt in memory and takes what it takes; leave out --memory, --reader, --minutes"
            )
        load = options.LoadFlags(
            device=device, dtype=dtype, kernels="torch", ignore_config_key=ignore_config_key, recovery=False
        )
        place, report = out or _place_of(model, GUARD), _report(tensorboard)
        train_guard(open_engine(model, (), load), changes or [], _rows(data or []), place, report, as_json=as_json)
        return
    values = override(recipe_named(recipe), changes or [])
    found = recipe_of(values)
    if is_dry and (adapter is not None or not isinstance(found, FrozenRecipe)):
        what = "over a LoRA" if adapter is not None else f"of a whole model ({values['kind']})"
        raise ConfigError(f"--dry-run is for weights beside a model as it is, not for a training {what}; leave it out")
    if adapter is not None:
        from vivace.recipes.over_lora import check_over_lora

        worn = Path(adapter.rpartition("=")[2])
        if answers is not None:
            raise ConfigError("over a LoRA weights learn what it writes, and --answers are the base's; give --data")
        check_over_lora(found, worn, has_data=bool(data))
        out = out or worn / "drafting" / str(values["kind"])
    if isinstance(found, (WholeRecipe, Seq2SeqRecipe)):
        if out is None:
            raise ConfigError("say where the result goes: --out DIR")
        if answers is not None:
            raise ConfigError(f"--answers is for weights beside a model; {values['kind']} learns from --data")
        if not data:
            raise ConfigError("say what to learn from: --data FILE (make one with `vivace data`)")
        if minutes is not None:
            raise ConfigError("--minutes is for weights beside a model; a decoder's stages have minutes of their own")
        if (memory, reader) != (None, "auto"):
            raise ConfigError(
                f"all weights of a model learn in memory ({values['kind']}); leave out --memory and --reader"
            )
        if dtype != "auto":
            raise ConfigError("all weights of a model are trained in its own dtype; leave out --dtype")
        if ignore_config_key:
            raise ConfigError("the trained model keeps config.json: remove the key there, not by --ignore-config-key")
        outcome = _train_whole(found, _rows(data), out, model, device, _report(tensorboard))
    else:
        if memory is not None and not is_store(folder_of(model)):
            raise ConfigError("only a store learns within --memory; leave it out, or: vivace convert OUT --store")
        if answers is None:
            given, values = None, with_text(values, has_data=bool(data))
        else:
            values = without_writing(values, changes or [], has_data=bool(data))
            given = read_answers(answers, base_hash(folder_of(model)))
        found = recipe_of(within(values, minutes))
        assert isinstance(found, FrozenRecipe)
        if out is None and found.kind in ("lora", "prompts"):
            what = "LoRA goes: --out DIR; the name of the folder is what requests call it"
            raise ConfigError(f"say where the {what if found.kind == 'lora' else 'soft prompts go: --out DIR'}")
        out = out or _place_of(model, found.folder)
        prompts = _rows(data or [], are_answered=bool(found.own_tokens))
        load = options.LoadFlags(
            device=device, dtype=dtype, kernels="torch", ignore_config_key=ignore_config_key, recovery=False
        )
        store = options.StoreFlags(memory, reader)
        if is_dry:
            show_dry_run(found, model, load, store, TextToLearn.of(found, prompts, given), out, as_json=as_json)
            return
        engine = open_engine(model, (), load, store)
        if adapter is not None:
            from vivace.recipes.over_lora import wear

            wear(engine, worn)
        if isinstance(found, PromptsRecipe):
            names = train_pool(found, engine, prompts, out, _report(tensorboard), given)
            if as_json:
                console.json({"out": str(out), "members": names})
            return
        report = _report(tensorboard)
        runs = train_beside(found, engine, prompts, out, report, answers=given, is_timed=adapter is None)
        if runs and not as_json:
            print_runs(runs)
        outcome = {"out": str(out), "runs": [asdict(run) for run in runs]}
    if as_json:
        console.json(outcome)


def _rows(data: list[Path], *, are_answered: bool = False) -> list[Prompt]:
    """Read the rows of all prompt files, among which conversations must have turns that can be learnt, or answered."""
    from vivace.train.data import check_questions, check_turns

    check = check_questions if are_answered else check_turns
    return [row for path in data for row in load_prompts(path, check=check)]


def _place_of(model: str | None, kind: str) -> Path:
    """Return where weights for a model go unless it is said: where ``--method`` looks for them.

    Raises:
        ConfigError: the model is not a folder of the user's.
    """
    if model is None or not Path(model).is_dir():
        raise ConfigError("say where the result goes: --out DIR")
    return Path(model) / "adapters" / kind


def _report(tensorboard: Path | None) -> Report:
    """Return what reports progress: notes on stderr, and TensorBoard curves if a folder for them is given."""
    from vivace.train.report import Curves, Lines

    lines = Lines(console.note)
    return lines if tensorboard is None else Curves(tensorboard, lines)


def _train_whole(
    recipe: WholeRecipe | Seq2SeqRecipe, prompts: list[Prompt], out: Path, base: str | None, device: str, report: Report
) -> dict[str, Any]:
    """Train all weights of a model and return the facts for JSON."""
    from vivace.recipes.seq2seq import Seq2SeqRecipe
    from vivace.recipes.seq2seq_trainer import train_seq2seq
    from vivace.recipes.whole_trainer import train_whole

    if isinstance(recipe, Seq2SeqRecipe):
        result = train_seq2seq(recipe, prompts, out, report, base, device)
    else:
        result = train_whole(recipe, prompts, out, report, base, device)
    return {"out": str(out), "steps": result.progress.step, "held_back": dict(result.held_back)}
