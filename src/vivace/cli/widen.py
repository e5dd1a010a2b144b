"""``vivace widen``: write a wider copy of a model that computes the same, for measuring models larger than the
cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.cli.inspect import model_facts
from vivace.cli.loading import folder_of
from vivace.units import format_bytes


def widen(
    output: Annotated[Path, typer.Argument(help="Folder to write.", metavar="OUT")],
    model: options.Model = None,
    factor: Annotated[int, typer.Option(help="How many times as wide; a power of two keeps weights exact.")] = 4,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            help="Folder of a LoRA to widen too, into OUT/loras/NAME, repeatable.",
            metavar="[NAME=]DIR",
        ),
    ] = None,
    ignore_config_key: options.IgnoreConfigKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Write a copy of a model and its adapters that is wider and computes the same.

    It writes the same text, accepts the same drafts and has factor² times the weights: a measuring instrument for
    models that do not fit into a processor's cache. LoRAs that --adapter names are widened with the drafts trained over
    them.
    """
    from vivace.checkpoint.widen import LORAS, widen_checkpoint, without_twin
    from vivace.methods.composition import twins

    source = folder_of(model)
    found = options.parse_adapters(adapter)
    named = {Path(found).name: found} if isinstance(found, str) else found or {}
    loras = {name: Path(folder) for name, folder in named.items()}
    with console.progress("widening"):
        target = widen_checkpoint(source, output, factor, twins(), loras=loras, ignored=ignore_config_key or ())
    facts, left_out = model_facts(target), without_twin(source, twins(), loras)
    written = [str(target / LORAS / name) for name in loras]
    if as_json:
        sizes = {name: facts[name] for name in ("parameters", "bytes")}
        console.json(
            {"folder": str(target), "factor": factor, **sizes, "adapters_left_out": left_out, "loras": written}
        )
    else:
        for name in left_out:
            console.note(f"the adapter {name} cannot be widened: the twin is without it")
        for folder in written:
            console.note(f"the LoRA's copy: {folder}")
        console.result(f"{target}: {facts['parameters'] / 1e6:.1f} million parameters, {format_bytes(facts['bytes'])}")
