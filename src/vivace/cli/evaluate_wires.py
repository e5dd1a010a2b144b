"""``vivace evaluate --wire``: how forms in which ranks send sums change a model, with simulated ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import vivace
from vivace.cli.console import console
from vivace.cli.loading import open_engine
from vivace.cli.options import LoadFlags
from vivace.cli.prompting import split_names, split_numbers
from vivace.errors import ConfigError
from vivace.prompts import load_text

if TYPE_CHECKING:
    from vivace.engine import Engine
    from vivace.evaluate.judging import Judgement
    from vivace.evaluate.perplexity import Perplexity

WINDOW = 512
"""Tokens that are read together."""

Wires = Annotated[
    str | None,
    typer.Option(
        help="Compare forms of sums over ranks instead of weights, with commas: bf16, int8, int4, lowbit, paper, "
        "open, random; FORM=DIR names the folder of calibrations. Needs --ranks, --simulate, and --text or --tasks.",
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


@dataclass(frozen=True)
class WireJudgement:
    """How one form of sums does on task files."""

    wire: str
    ranks: int
    judgements: list[Judgement]
    """One for each task, beside one process."""
    mean: float | None
    """Mean over tasks above chance of the share that is right by byte; None where no task is."""
    retained: float | None
    """That mean by the one of one process."""


def evaluate_wires(
    model: str | None,
    flags: WireFlags,
    load: LoadFlags,
    *,
    tasks: Sequence[Path] = (),
    limit: int | None = None,
    as_json: bool,
) -> None:
    """Measure forms of sums for numbers of ranks, beside one process, by a text's perplexity or by task files.

    Raises:
        ConfigError: a flag is missing or no number.
        NotFoundError: there is no such text or calibration.
    """
    forms = split_names(flags.wire or "")
    numbers = split_numbers(flags.ranks, "--ranks", least=2) if flags.ranks else []
    if not flags.simulate:
        raise ConfigError("--wire compares forms on simulated ranks; give --simulate")
    if not forms or not numbers or not (flags.text or tasks):
        raise ConfigError("--wire needs forms, numbers of ranks and a text: --wire bf16,lowbit --ranks 2,4 --text FILE")
    if flags.text is not None and tasks:
        raise ConfigError("--text and --tasks are measured one at a time; leave out one of them")
    pairs = [(form, number) for number in numbers for form in forms]
    base = open_engine(model, (), load)
    if tasks:
        _judge_wires(base, pairs, load, tasks, limit, as_json=as_json)
    else:
        assert flags.text is not None
        _read_wires(base, pairs, load, flags.text, flags.windows, as_json=as_json)


def _read_wires(
    base: Engine,
    pairs: Sequence[tuple[str, int]],
    load: LoadFlags,
    place: Path,
    most: int | None,
    *,
    as_json: bool,
) -> None:
    """Measure the perplexity of a text with each form and number of ranks."""
    from vivace.evaluate.perplexity import windows_of
    from vivace.evaluate.provenance import provenance

    text = load_text(place)
    size = min(WINDOW, base.model.config.max_positions)
    windows = windows_of(base.tokenizer.encode(text, special=False), size, most)
    rows = [_measured(base, "one process", 1, windows)]
    for form, ranks in pairs:
        with _simulated(base, load, form, ranks) as engine:
            rows.append(_measured(engine, form.partition("=")[0], ranks, windows))
        console.note(f"{form} on {ranks} ranks: perplexity {rows[-1].perplexity:.3f}")
    if as_json:
        setting = {"model": base.folder.name, "text": place.name, "window": size, "num_windows": len(windows)}
        where = asdict(provenance(base.model.device))
        console.json({"provenance": where, "setting": setting, "wires": [asdict(row) for row in rows]})
        return
    print_wires(rows)


def _judge_wires(
    base: Engine,
    pairs: Sequence[tuple[str, int]],
    load: LoadFlags,
    tasks: Sequence[Path],
    limit: int | None,
    *,
    as_json: bool,
) -> None:
    """Judge each form and number of ranks by task files, and say what share of one process's score is left."""
    from vivace.evaluate.judging import JudgedSystem, judge
    from vivace.evaluate.provenance import provenance
    from vivace.evaluate.zeroshot import load_task

    rows = [row for path in tasks for row in load_task(path, limit)]
    chance: dict[str, float] = {}
    for task in dict.fromkeys(row.task for row in rows):
        counts = [row.num_choices for row in rows if row.task == task]
        chance[task] = sum(0.0 if count == 1 else 1 / count for count in counts) / len(counts)
    with ExitStack() as opened, console.progress("judging") as progress:
        engines = [opened.enter_context(_simulated(base, load, form, ranks)) for form, ranks in pairs]
        names = [f"{form.partition('=')[0]} on {ranks}" for form, ranks in pairs]
        systems = [
            JudgedSystem(name, engine) for name, engine in zip(("one process", *names), (base, *engines), strict=True)
        ]
        found = judge(systems, rows, on_progress=progress)
    alone = [one for one in found if one.system == "one process"]
    counted = [one.task for one in alone if is_above_chance(one, chance[one.task])]
    whole = _mean(alone, counted)
    judged = [WireJudgement("one process", 1, alone, whole, None)]
    for name, (form, ranks) in zip(names, pairs, strict=True):
        own = [one for one in found if one.system == name]
        mean = _mean(own, counted)
        judged.append(WireJudgement(form.partition("=")[0], ranks, own, mean, mean / whole if mean and whole else None))
    if as_json:
        setting = {"model": base.folder.name, "tasks": [path.stem for path in tasks], "num_rows": len(rows)}
        setting |= {"limit": limit, "chance": chance, "counted": counted}
        where = asdict(provenance(base.model.device))
        console.json({"provenance": where, "setting": setting, "wires": [asdict(one) for one in judged]})
        return
    print_judged(judged, counted)


def is_above_chance(one: Judgement, chance: float) -> bool:
    """Return whether a task's score lies above chance by more than 1.64 standard errors."""
    score = one.accuracy_by_byte
    return score is not None and score - 1.64 * (score * (1 - score) / one.num_rows) ** 0.5 > chance


def _mean(judgements: Sequence[Judgement], tasks: Sequence[str]) -> float | None:
    """Return the mean over some tasks of what is right by byte; None over no task."""
    values = [one.accuracy_by_byte for one in judgements if one.task in tasks and one.accuracy_by_byte is not None]
    return sum(values) / len(values) if values else None


@contextmanager
def _simulated(base: Engine, load: LoadFlags, form: str, ranks: int) -> Iterator[Engine]:
    """Open a model on simulated ranks with one form of sums."""
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
        yield engine
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


def print_judged(judged: Sequence[WireJudgement], counted: Sequence[str]) -> None:
    """Print one row for each form and number of ranks."""
    table = []
    for one in judged:
        values = [] if one.mean is None else [f"{one.mean:.1%}"]
        values += ["-"] * (1 - len(values)) + ["-" if one.retained is None else f"{one.retained:.1%}"]
        table.append([one.wire, str(one.ranks), *values])
    console.table("", ["wire", "ranks", "right by byte", "of one process"], table)
    console.note(f"means over tasks above chance: {', '.join(counted) or 'none'}")
