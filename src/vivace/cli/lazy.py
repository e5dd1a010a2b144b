"""``vivace train lazy`` and ``vivace tune lazy``: what pruned prompts are scored with, and how much of them goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vivace.cli.console import console
from vivace.errors import ConfigError
from vivace.prefill.table import MIN_PROMPT
from vivace.prompts import Prompt

if TYPE_CHECKING:
    from vivace.engine import Engine
    from vivace.recipes.lazy_plan import TriedSchedule
    from vivace.train.report import Report

LAZY = "lazy"
"""What names pruned prompts beside the methods."""
SHOWN = 8


def train_lazy(
    engine: Engine,
    changes: Sequence[str],
    prompts: Sequence[Prompt],
    out: Path,
    minutes: float | None,
    report: Report,
    *,
    as_json: bool,
) -> None:
    """Learn the scores of a model on prompts, and print how good they are.

    Raises:
        ConfigError: there are no prompts, or a change is unknown.
    """
    from vivace.configuration import build
    from vivace.recipes.lazy import KEEP, LazyRecipe, learn
    from vivace.recipes.reading import override

    if not prompts:
        raise ConfigError("say what to learn from: --data FILE (make one with `vivace data multidoc SRC OUT`)")
    found = learn(build(LazyRecipe, override({}, changes)), engine, prompts, out, report, minutes)
    if as_json:
        console.json({"out": str(out), "scores": [asdict(each) for each in found]})
        return
    rows = [[each.score, str(each.point), f"{each.share:.0%}"] for each in found[:SHOWN]]
    heads = ["score", "behind layer", f"of what answers read, kept with {KEEP:.0%} of the tokens"]
    console.table("", heads, rows)
    console.note(f"wrote {out}; choose a schedule for your prompts: vivace tune lazy --model {engine.folder}")


def tune_lazy(
    engine: Engine, prompts: Sequence[Prompt], floor: float, *, name: str = LAZY, keep: bool, as_json: bool
) -> None:
    """Find the soonest schedule of a way of reading that keeps the floor, print the curve, and keep the winner.

    Raises:
        ConfigError: the floor cannot be, or there are too few long prompts.
    """
    from vivace.prefill.pruned import check_model
    from vivace.recipes.lazy_plan import candidates, keep_schedule, questions, search

    if not 0 < floor <= 1:
        raise ConfigError(f"--floor is {floor}; it must be in (0, 1]")
    check_model(engine.model, name)
    asked = questions(engine, prompts, MIN_PROMPT)
    if len(asked) < 4:
        raise ConfigError(
            f"{len(asked)} of {len(prompts)} prompts have {MIN_PROMPT} tokens or more; at least 4 are needed, such as "
            "those of: vivace data multidoc SRC OUT"
        )
    trials, confirmed = search(
        engine,
        candidates(engine, name),
        asked,
        floor,
        lambda trial, half: console.note(f"{trial.keep}, {half} {trial.num_prompts} prompts: {_line(trial)}"),
        name,
    )
    rows = [
        [t.keep, str(t.num_prompts), f"{t.speedup:.2f}x", f"{t.share:.0%}", f"{t.kept:.1%}", f"{t.more_nll:+.3f}"]
        for t in trials
    ]
    if as_json:
        chosen = None if confirmed is None else asdict(confirmed)
        console.json(
            {"prefill": name, "floor": floor, "trials": [asdict(trial) for trial in trials], "confirmed": chosen}
        )
    else:
        console.table("", ["keep", "prompts", "first token", "layer passes", "likelihood kept", "more NLL"], rows)
    if confirmed is None:
        console.note(f"no schedule kept {floor:.0%} of the likelihood on both halves; the plan is as it was")
    else:
        console.note(f"confirmed on the other half: {confirmed.keep}, {_line(confirmed)}")
        if name != LAZY:
            console.note(f"{name} keeps no plan; write: --prefill {name} --keep {confirmed.keep}")
        elif keep:
            console.note(f"the plan in {keep_schedule(engine, confirmed.keep)} is now: {confirmed.keep}")


def _line(trial: TriedSchedule) -> str:
    """Return the figures of a schedule on one line."""
    return f"{trial.speedup:.2f}x sooner, {trial.kept:.1%} of the likelihood, {trial.more_nll:+.3f} nats"
