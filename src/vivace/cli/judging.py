"""``vivace evaluate A B --tasks FILE``: models beside each other by likelihood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vivace.cli.console import console
from vivace.cli.loading import open_engine
from vivace.cli.options import LoadFlags
from vivace.errors import ConfigError

if TYPE_CHECKING:
    from vivace.evaluate.bootstrap import Interval
    from vivace.evaluate.judging import Judgement


def check_unused(given: Mapping[str, bool]) -> None:
    """Refuse flags that are about answers.

    Raises:
        ConfigError: one is given.
    """
    if idle := [flag for flag, is_given in given.items() if is_given]:
        raise ConfigError(f"{idle[0]} is about answers, and --tasks asks for none; leave one of them out")


def judge_models(
    models: Sequence[str | None],
    tasks: Sequence[Path],
    load: LoadFlags,
    *,
    limit: int | None,
    use: str | None,
    as_json: bool,
) -> None:
    """Judge models on task files and print what was found; the first model is the one that others are compared with."""
    from vivace.evaluate.judging import JudgedSystem, judge, mean_accuracy
    from vivace.evaluate.provenance import provenance
    from vivace.evaluate.zeroshot import load_task

    rows = [row for path in tasks for row in load_task(path, limit)]
    systems = []
    for name in models:
        engine = open_engine(name, (), load, use=use)
        systems.append(JudgedSystem(engine.folder.name if name else "shipped", engine, use))
    if len({system.name for system in systems}) < len(systems):
        systems = [
            JudgedSystem(name or "shipped", each.engine, use) for name, each in zip(models, systems, strict=True)
        ]
    with console.progress("judging") as progress:
        found = judge(systems, rows, on_progress=progress)
    if as_json:
        where = asdict(provenance(systems[0].engine.model.device))
        setting: dict[str, object] = {
            "models": [system.name for system in systems],
            "tasks": [path.name for path in tasks],
        }
        setting |= {"num_rows": len(rows), "limit": limit, "adapter": use}
        console.json({"provenance": where, "setting": setting, "judgements": [asdict(one) for one in found]})
        return
    _print(found)
    for system in systems:
        if (mean := mean_accuracy(found, system.name)) is not None:
            console.result(f"{system.name}: {mean:.1%} right by byte, mean over tasks")


def _print(found: Sequence[Judgement]) -> None:
    """Print one row for each task and model."""
    heads = [
        "task",
        "model",
        "rows",
        "right",
        "by byte",
        "perplexity",
        "KL",
        "flips",
        "change by byte",
        "change of nats",
    ]
    rows = [
        [
            *(one.task, one.system, str(one.num_rows), _percent(one.accuracy), _percent(one.accuracy_by_byte)),
            *(f"{one.perplexity:.4g}", _figure(one.kl), _percent(one.flips)),
            *(_interval(one.by_byte_change), _interval(one.nll_change)),
        ]
        for one in found
    ]
    console.table("", heads, rows)
    console.note(
        "right: the likeliest option is the right one, or the continuation is what the model would write; changes: "
        "from the first model, a row or piece of text, with 95 % intervals of the paired bootstrap"
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _interval(value: Interval | None) -> str:
    return "-" if value is None else f"{value.estimate:+.3f} [{value.low:+.3f}, {value.high:+.3f}]"
