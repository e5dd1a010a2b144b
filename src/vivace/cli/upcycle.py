"""``vivace upcycle``: turn a dense model into a mixture of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.cli.inspect import model_facts
from vivace.cli.loading import folder_of
from vivace.units import format_bytes


def upcycle(
    output: Annotated[Path, typer.Argument(help="Folder to write.", metavar="OUT")],
    model: options.Model = None,
    experts: Annotated[int, typer.Option(help="Copies of each feed-forward.")] = 16,
    top_k: Annotated[int, typer.Option(help="Of them, those each token goes through.")] = 2,
    noise: Annotated[float, typer.Option(help="What is added to each copy, in standard deviations of weights.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of routers and noise.")] = 0,
    ignore_config_key: options.IgnoreConfigKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Write the mixture of experts that a dense model becomes: copies of its feed-forwards behind routers.

    Train it next, or the copies stay alike: vivace train upcycle --model OUT --data FILE --out DIR
    """
    from vivace.checkpoint.upcycle import upcycle_checkpoint

    source = folder_of(model)
    with console.progress("upcycling"):
        target = upcycle_checkpoint(
            source,
            output,
            num_experts=experts,
            top_k=top_k,
            noise=noise,
            seed=seed,
            ignored=ignore_config_key or (),
        )
    facts = model_facts(target)
    if as_json:
        sizes = {name: facts[name] for name in ("parameters", "bytes")}
        console.json({"folder": str(target), "experts": experts, "top_k": top_k, **sizes})
    else:
        console.result(f"{target}: {facts['parameters'] / 1e6:.1f} million parameters, {format_bytes(facts['bytes'])}")
