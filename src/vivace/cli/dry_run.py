"""``vivace train --dry-run``: what a training would need, while nothing is trained and nothing is written."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.cli.console import console
from vivace.cli.loading import folder_of, open_engine
from vivace.cli.options import LoadFlags, StoreFlags
from vivace.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from vivace.recipes.dry_run import DryRun, Figure, TextToLearn
    from vivace.recipes.frozen import FrozenRecipe


def show_dry_run(
    recipe: FrozenRecipe,
    model: str | None,
    load: LoadFlags,
    store: StoreFlags,
    text: TextToLearn,
    out: Path,
    *,
    as_json: bool,
) -> None:
    """Estimate a training and print the figures.

    Raises:
        UnsupportedError: the result could not decode with the model.
    """
    from vivace.checkpoint.load import choose_device
    from vivace.recipes.dry_run import dry_run, is_loadable, without_weights
    from vivace.storage.store import is_store

    folder, device = folder_of(model), choose_device(load.device)
    if is_store(folder) or is_loadable(folder, device):
        engine = open_engine(model, (), load, store)
    else:
        console.note(f"{folder} has no weights that fit here: figures are computed from its config.json")
        engine = without_weights(folder, load.dtype, load.device, load.ignore_config_key or ())
    found = dry_run(recipe, engine, text, device)
    if as_json:
        console.json(_facts(found, recipe, engine.model.dtype, device, out))
        return
    rows = [[name, _shown(figure), figure.how] for name, figure in found.figures.items()]
    console.table(f"{recipe.kind}, on {device}", ["", "", ""], rows)
    for name, size in found.files.items():
        console.result(f"would write {out / name if name != 'weights' else out}: about {format_bytes(size)}")
    console.result(f"memory: {_verdict(found.fits)}")
    for note in found.notes:
        console.note(note)


def _facts(found: DryRun, recipe: FrozenRecipe, dtype: object, device: object, out: Path) -> dict[str, Any]:
    """Return the figures for JSON."""
    return {
        "kind": recipe.kind,
        "out": str(out),
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "fits": found.fits,
        "figures": {name: asdict(figure) for name, figure in found.figures.items()},
        "files": dict(found.files),
        "notes": list(found.notes),
    }


def _verdict(fits: bool | None) -> str:
    if fits is None:
        return "this system does not say how much is free"
    return "what is needed is free" if fits else "NOT free; lower tokens_per_batch, or choose a smaller model"


def _shown(figure: Figure) -> str:
    """Return a number with its unit, for people."""
    if figure.unit == "B":
        return format_bytes(int(figure.value))
    if figure.unit == "B/s":
        return f"{format_bytes(int(figure.value))}/s"
    if figure.unit == "FLOP/s":
        return f"{figure.value / 1e9:,.0f} GFLOP/s"
    if figure.unit == "s":
        return format_seconds(figure.value)
    if figure.unit == "min":
        return format_seconds(60 * figure.value)
    return f"{figure.value:,.0f} {figure.unit}"
