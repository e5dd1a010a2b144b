"""``vivace evaluate --wire``: how forms in which ranks send sums change a model, with simulated ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import vivace
from vivace.cli.console import console
from vivace.cli.loading import open_engine
from vivace.cli.options import LoadFlags
from vivace.cli.prompting import split_names
from vivace.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from vivace.engine import Engine
    from vivace.evaluate.perplexity import Perplexity

WINDOW = 512
"""Tokens that are read together."""

Wires = Annotated[
    str | None,
    typer.Option(
        help="Compare forms of sums over ranks instead of weights, with commas: bf16, int8, int4, lowbit, paper, "
        "random; FORM=DIR names the folder of calibrations. Needs --ranks, --text and --simulate.",
        metavar="FORMS",
    ),
]
Ranks = Annotated[str | None, typer.Option(help="Numbers of ranks, with commas.", metavar="N,...")]
Simulate = Annotated[bool, typer.Option("--simulate", help="All ranks are threads of this process.")]
Text = Annotated[Path | None, typer.Option(help="A text whose perplexity is measured.", metavar="FILE")]
Windows = Annotated[int | None, typer.Option(help="Most windows of 512 tokens of the text.", min=1, metavar="N")]


@dataclass(frozen=True)
class WireFlags:
    """Flags for comparing forms of sums."""

    wire: Wires = None
    ranks: Ranks = None
    simulate: Simulate = False
    text: Text = None
    windows: Windows = None


@dataclass(frozen=True)
class WireQuality:
    """What one form of sums does to a model."""

    wire: str
    ranks: int
    bits: float | None
    """Bits of a number on the wire, everything counted: what rank 0 sent to one other in one shot, over the numbers."""
    saturation: float | None
    """Share of coded numbers that were clipped."""
    perplexity: float
    num_tokens: int


def evaluate_wires(model: str | None, flags: WireFlags, load: LoadFlags, *, as_json: bool) -> None:
    """Measure the perplexity of a text for forms and numbers of ranks, beside one process, and print it.

    Raises:
        ConfigError: a flag is missing or no number.
        NotFoundError: there is no such text or calibration.
    """
    from vivace.evaluate.perplexity import windows_of
    from vivace.evaluate.provenance import provenance

    forms, numbers = split_names(flags.wire or ""), split_names(flags.ranks or "")
    if not flags.simulate:
        raise ConfigError("--wire compares forms on simulated ranks; give --simulate")
    if not forms or flags.text is None or not numbers or not all(number.isdigit() for number in numbers):
        raise ConfigError("--wire needs forms, numbers of ranks and a text: --wire bf16,lowbit --ranks 2,4 --text FILE")
    if not flags.text.is_file():
        raise NotFoundError(f"there is no text {flags.text}")
    try:
        text = flags.text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flags.text} is not text in UTF-8") from error
    base = open_engine(model, (), load)
    size = min(WINDOW, base.model.config.max_positions)
    windows = windows_of(base.tokenizer.encode(text, special=False), size, flags.windows)
    rows = [_measured(base, "one process", 1, windows)]
    for number in numbers:
        for form in forms:
            rows.append(_simulated(base, load, form, int(number), windows))
            console.note(f"{form} on {number} ranks: perplexity {rows[-1].perplexity:.3f}")
    if as_json:
        setting = {"model": base.folder.name, "text": flags.text.name, "window": size, "num_windows": len(windows)}
        where = asdict(provenance(base.model.device))
        console.json({"provenance": where, "setting": setting, "wires": [asdict(row) for row in rows]})
        return
    print_wires(rows)


def _simulated(base: Engine, load: LoadFlags, form: str, ranks: int, windows: list[list[int]]) -> WireQuality:
    """Measure one form on simulated ranks."""
    from vivace.parallel.simulated import SimulatedLoading

    name = "same" if form == "bf16" and str(base.model.dtype) == "torch.bfloat16" else form
    engine = vivace.load(
        base.folder,
        dtype=load.dtype,
        kernels="torch",
        ignore_config_keys=load.ignore_config_key or (),
        parallel=SimulatedLoading(ranks, name),
    )
    try:
        return _measured(engine, form.partition("=")[0], ranks, windows)
    finally:
        assert engine.world is not None
        engine.world.close()


def _measured(engine: Engine, form: str, ranks: int, windows: list[list[int]]) -> WireQuality:
    from vivace.evaluate.perplexity import perplexity

    found: Perplexity = perplexity(engine, windows)
    world, bits = engine.world, None
    if world is not None:
        bits = _bits(engine, windows)
    return WireQuality(form, ranks, bits, None if world is None else world.saturation, found.value, found.num_tokens)


def _bits(engine: Engine, windows: list[list[int]]) -> float:
    """Return bits of a number on the wire: the payload of one row at the first sum, with what belongs to the row."""
    import torch

    assert engine.world is not None
    row = torch.zeros(1, engine.model.config.width, dtype=engine.model.dtype)
    parts: Any = engine.world.wire.encode(row, (0, "down"), 0)
    return float(8 * sum(part.nbytes for part in parts) / row.numel())


def print_wires(rows: list[WireQuality]) -> None:
    """Print one row for each form and number of ranks."""
    table = [
        [
            *(row.wire, str(row.ranks), "-" if row.bits is None else f"{row.bits:.2f}"),
            *(f"{row.perplexity:.3f}", "-" if row.saturation is None else f"{row.saturation:.2%}"),
        ]
        for row in rows
    ]
    console.table("", ["wire", "ranks", "bits a value", "perplexity", "clipped"], table)
