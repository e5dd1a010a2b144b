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
    from vivace.evaluate.judging import JudgedSystem, Judgement


def check_unused(given: Mapping[str, bool], beside: str = "--tasks") -> None:
    """Refuse flags that are about answers; ``beside`` names the flag that asks for none.

    Raises:
        ConfigError: one is given.
    """
    if idle := [flag for flag, is_given in given.items() if is_given]:
        raise ConfigError(f"{idle[0]} is about answers, and {beside} asks for none; leave one of them out")


def judge_models(
    models: Sequence[str | None],
    tasks: Sequence[Path],
    load: LoadFlags,
    *,
    limit: int | None,
    use: str | None,
    soft_prompt: str | None,
    as_json: bool,
) -> None:
    """Judge models on task files and print what was found; the first model is the one that others are compared with.

    With a pool of soft prompts each model is judged without one, and behind the one that a row gets.

    Raises:
        ConfigError: a soft prompt is named without a pool.
    """
    from vivace.evaluate.judging import judge, mean_accuracy
    from vivace.evaluate.provenance import provenance
    from vivace.evaluate.zeroshot import load_task

    rows = [row for path in tasks for row in load_task(path, limit)]
    systems = _systems(models, load, use, soft_prompt)
    with console.progress("judging") as progress:
        found = judge(systems, rows, on_progress=progress)
    if as_json:
        where = asdict(provenance(systems[0].engine.model.device))
        setting: dict[str, object] = {
            "models": [system.name for system in systems],
            "tasks": [path.name for path in tasks],
        }
        setting |= {"num_rows": len(rows), "limit": limit, "adapter": use}
        if load.prompt_pool is not None:
            setting["prompt_pool"] = load.prompt_pool.name
        console.json({"provenance": where, "setting": setting, "judgements": [asdict(one) for one in found]})
        return
    _print(found)
    for system in systems:
        if (mean := mean_accuracy(found, system.name)) is not None:
            console.result(f"{system.name}: {mean:.1%} right by byte, mean over tasks")


def _systems(
    models: Sequence[str | None], load: LoadFlags, use: str | None, soft_prompt: str | None
) -> list[JudgedSystem]:
    """Open models, each under a name of its own; those with a pool of soft prompts are there without and with it."""
    from vivace.adapters.pool.pool import AUTO, NONE
    from vivace.evaluate.judging import JudgedSystem

    if soft_prompt is not None and load.prompt_pool is None:
        raise ConfigError("--soft-prompt names one of a pool; give the pool as --prompt-pool DIR")
    engines = [open_engine(name, (), load, use=use) for name in models]
    names = [engine.folder.name if name else "shipped" for name, engine in zip(models, engines, strict=True)]
    if len(set(names)) < len(names):
        names = [name or "shipped" for name in models]
    if load.prompt_pool is None:
        return [JudgedSystem(name, engine, use) for name, engine in zip(names, engines, strict=True)]
    added = f"{load.prompt_pool.name}{'' if soft_prompt is None else f' {soft_prompt}'}"
    return [
        system
        for name, engine in zip(names, engines, strict=True)
        for system in (
            JudgedSystem(name, engine, use, NONE),
            JudgedSystem(f"{name} + {added}", engine, use, soft_prompt or AUTO),
        )
    ]


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
