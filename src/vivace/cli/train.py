"""``vivace train``: a recipe, a base and prompt files in; weights that decode, and how fast, out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vivace.cli import options
from vivace.cli.bench import print_runs
from vivace.cli.console import console
from vivace.cli.opening import ModelChoice, open_engine
from vivace.errors import ConfigError
from vivace.methods.table import METHODS
from vivace.prompts import load_prompts
from vivace.recipe import build, override, read_recipe

if TYPE_CHECKING:
    from vivace.evaluate.contest import Run
    from vivace.train.report import Report


def kinds_of_models() -> list[str]:
    """Kinds of recipes that train all weights of a model."""
    return ["decoder", "supervised", *(spec.name for spec in METHODS.values() if spec.training == "whole")]


def kinds() -> list[str]:
    """What a recipe can be for: a model, or what a method needs."""
    return [*kinds_of_models(), "shared", *(spec.name for spec in METHODS.values() if spec.training == "beside")]


def train(
    recipe: Annotated[str, typer.Argument(help="A recipe file (YAML or JSON), or the name of one that ships.")],
    changes: Annotated[
        list[str] | None, typer.Argument(help="Changes to the recipe, such as loop.minutes=5.", metavar="KEY=VALUE...")
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="A prompt file with references, repeatable.", metavar="FILE")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; a killed run there goes on.")] = None,
    model: options.Model = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    memory: options.Memory = None,
    reader: options.Reader = "auto",
    tensorboard: Annotated[
        Path | None, typer.Option(help="Folder for TensorBoard curves; needs the extra 'train'.", metavar="DIR")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Train what a recipe describes; interrupt it whenever you like, the same command goes on."""
    values = override(read_recipe(recipe), changes or [])
    if out is None:
        raise ConfigError("say where the result goes: --out DIR")
    if not data:
        raise ConfigError("say what to learn from: --data FILE (make one with `vivace data`)")
    kind = values.get("kind")
    if kind not in kinds():
        raise ConfigError(f"a recipe's kind is one of {', '.join(kinds())}, found {kind!r}")
    if kind in kinds_of_models():
        if (memory, reader) != (None, "auto"):
            raise ConfigError(f"all weights of a model learn in memory ({kind}); leave out --memory and --reader")
        if (device, dtype) != ("auto", "auto"):
            raise ConfigError("a decoder is trained on the CPU in its own dtype; leave out --device and --dtype")
        outcome = _run_decoder(values, data, out, model, tensorboard)
    else:
        choice = ModelChoice(model=model, device=device, dtype=dtype, kernels="torch", memory=memory, reader=reader)
        runs = _run(values, data, out, choice, tensorboard)
        if not as_json:
            print_runs(runs)
        outcome = {"out": str(out), "runs": [asdict(run) for run in runs]}
    if as_json:
        console.json(outcome)


def _report(tensorboard: Path | None) -> Report:
    from vivace.train.report import Curves, Lines

    lines = Lines(console.note)
    return lines if tensorboard is None else Curves(tensorboard, lines)


def _run(values: dict[str, Any], data: list[Path], out: Path, choice: ModelChoice, curves: Path | None) -> list[Run]:
    from vivace.training.confidence import ConfidenceRecipe, train_confidence
    from vivace.training.draft import DraftRecipe, train_draft
    from vivace.training.run import recipe_of, train_adapter
    from vivace.training.shared import SharedRecipe, train_shared

    prompts = [row for path in data for row in load_prompts(path)]
    if values["kind"] == "draft":
        return train_draft(build(DraftRecipe, values), open_engine(choice), prompts, out, _report(curves))
    if values["kind"] in ("calm", "lite"):
        confidence = build(ConfidenceRecipe, values)
        return train_confidence(confidence, open_engine(choice), prompts, out, _report(curves))
    if values["kind"] == "shared":
        return train_shared(build(SharedRecipe, values), open_engine(choice), prompts, out, _report(curves))
    recipe = build(recipe_of(values["kind"]), values)
    return train_adapter(recipe, open_engine(choice), prompts, out, _report(curves))


def _run_decoder(
    values: dict[str, Any], data: list[Path], out: Path, base: str | None, curves: Path | None
) -> dict[str, Any]:
    from vivace.train.decoder import DecoderRecipe, train_decoder
    from vivace.training.mod import ModRecipe, train_mod
    from vivace.training.whole import WholeRecipe, train_whole

    prompts = [row for path in data for row in load_prompts(path)]
    if values["kind"] == "decoder":
        outcome = train_decoder(build(DecoderRecipe, values), prompts, out, _report(curves), base)
    elif values["kind"] == "mod":
        outcome = train_mod(build(ModRecipe, values), prompts, out, _report(curves), base)
    else:
        outcome = train_whole(build(WholeRecipe, values), prompts, out, _report(curves), base)
    return {"out": str(out), "steps": outcome.progress.step, "held_back": dict(outcome.held_back)}
