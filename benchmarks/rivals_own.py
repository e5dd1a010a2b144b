"""Rivals trained on one shared file of a model's own answers, for equal processor time (``rivals own`` and ``chat``).

Every system gets the same prompts, the same answers, the same draft vocabulary, the same batches and the same minutes.
Minutes are those that processors spend on the training (``loop.clock=processor``) on a machine that does other work
meanwhile. Trainings take their steps in turn, so that the model's own pass over a batch is made once; it counts for
each of them, as it would if they trained alone. A killed series goes on where it was: a system whose weights exist is
passed over, and trainings that were begun continue from their snapshots.

Measuring first chooses a plan for each system on prompts for tuning, among as many candidates for each, and then lets
all of them answer the prompts of each category in turns, beside methods that need no training. What ``auto``, lookup
and quantized drafts do is measured on a model beside which no other weights lie, as a user would have it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch

import vivace
from benchmarks import captions
from benchmarks.chat_drafts import answered, means, report_of
from benchmarks.in_turn import learn_in_turn
from benchmarks.result_files import NO_RUN, read_named
from tools.blocks import table
from vivace.decode.shallow import DraftPlan
from vivace.engine import Engine
from vivace.evaluate.benchmark import BenchmarkPrompt, Named, run_benchmark, summarise
from vivace.evaluate.provenance import provenance
from vivace.evaluate.systems import MethodSystem
from vivace.methods.composition import plan_of
from vivace.methods.spec import Plan
from vivace.prompts import load_prompts
from vivace.recipes.own_text import written_before
from vivace.train.data import Rows
from vivace.train.distillation import FrozenPass
from vivace.train.resume import read_state
from vivace.tuning import planned

SYSTEMS: Mapping[str, tuple[str, ...]] = {
    "multirate": ("adapter.exit_layer=6", "find_reach=4", "plan.widths=[1,1,1]", "plan.weights=q4"),
    "multirate-deep": (
        *("adapter.exit_layer=20", "adapter.feedback=false", "find_reach=0"),
        *("plan.widths=[1,1,1]", "plan.weights=q4"),
    ),
    "deed": ("adapter.exit_layer=6", "plan.widths=[1,1,1]", "plan.weights=q4"),
    "medusa": ("adapter.own_output=false", "plan.widths=[1,1,1]"),
    "eagle": ("plan.widths=[1,1,1]",),
    "uno": ("adapter.block=4", "plan.widths=[1,1,1]"),
    "draft": ("layers=[0,1,2,29]",),
    "multistream": ("adapter.insertion_layer=22", "adapter.pruner_rank=0", "plan.widths=[1,1,1]"),
    "multistream-every": (
        *("adapter.insertion_layer=22", "adapter.pruner_rank=0", "adapter.feedback=false"),
        *("plan.attach=every", "plan.widths=[1,1,1]"),
    ),
}
"""Systems in the order of their training, and what each changes in its recipe for a model of thirty layers and 49,152
tokens: output matrices for each head of Medusa would be as many weights as the whole model; streams that enter low, or
a pruner that reads the whole head, would learn from a third of the text in the same time. ``multirate-deep`` exits
where the residual has begun to name tokens (``exits``), without feedback and reach, which is the published method with
a late gate; its guesses cost three times as much."""
FREE = ("lookup", "lookahead", "quantized", "quantized+lookup", "auto")
"""Methods that are measured beside. The weights of ``quantized`` are those that a recipe has rounded, where there are
any in ``--runs``; else they are rounded one by one while loading, and ``auto`` does not try them."""
VOCABULARY = 8192
"""Tokens of the draft vocabulary that every system learns to guess; a draft model reads its own head."""
SHARED = (
    "loop.clock=processor",
    "loop.autocast=true",
    "loop.accumulate=1",
    "loop.warmup_steps=10",
    "loop.evaluate_steps=100000",
    "loop.snapshot_s=60",
    "tokens_per_batch=512",
    "held_back=8",
)
"""Changes to every recipe."""
FACTS = "training.json"
PLANS = "chat_plans.json"
EXITS = "exits.json"
ABOUT = "about.json"
"""File in ``--runs`` that says, by system, what else it learnt from than the others."""


def method_of(system: str) -> str:
    """Return the method of a system: the word before the first hyphen."""
    return system.partition("-")[0]


def train_equally(
    model: str,
    answers: Path,
    runs: Path,
    minutes: float,
    systems: Sequence[str],
    device: str = "auto",
    changes: Sequence[str] = (),
) -> None:
    """Train systems in turn as ``RUNS/<system>``, each for so many minutes of work; those with weights stay.

    The model's pass over a batch is made once for all of them, and counts for each.

    Args:
        model: folder of the model.
        answers: its own answers, which all learn from.
        runs: where the weights go.
        minutes: of a processor, or of a GPU, for each.
        systems: which to train; empty trains all.
        device: where.
        changes: to the recipes, ``KEY=VALUE`` for all or ``SYSTEM:KEY=VALUE`` for one.
    """
    engine = vivace.load(model, kernels="torch", device=device)
    drafters = {runs / one: (method_of(one), _changes(one, minutes, changes)) for one in systems or SYSTEMS}
    for out in learn_in_turn(engine, answers, drafters):
        progress = read_state(out / "run" / "state.pt")["progress"]
        facts = {"steps": progress["step"], "minutes": progress["elapsed_s"] / 60, "tokens": progress["num_tokens"]}
        (out / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    if not (runs / EXITS).is_file():
        (runs / EXITS).write_text(json.dumps(exits(model, answers)) + "\n", encoding="utf-8")


def _changes(system: str, minutes: float, further: Sequence[str] = ()) -> list[str]:
    """Return the changes to its recipe with which a system learns from answers that are given."""
    size = () if system == "draft" else (f"plan.vocabulary={VOCABULARY}",)
    named = [change.rpartition(":") for change in further]
    asked = [change for of, _, change in named if of in ("", system)]
    return [*SHARED, f"loop.minutes={minutes}", *SYSTEMS[system], *size, *asked]


@torch.no_grad()
def exits(model: str, answers: Path, rows: int = 6) -> dict[int, float]:
    """Return how often the head on the residual after so many layers, untrained, names the model's own token.

    Args:
        model: folder of the model.
        answers: its own answers.
        rows: number of answers that are read, the last of the file.
    """
    engine = vivace.load(model, kernels="torch")
    pairs = written_before(engine, answers)[-rows:]
    encode = Rows(engine.tokenizer, 256, engine.model.device, cuts=True)
    depths = range(2, engine.model.config.num_layers, 2)
    agreed, count = dict.fromkeys(depths, 0), 0
    for batch in encode.batches(pairs, 2048):
        frozen = FrozenPass.of(engine.model, batch.tokens, depths)
        truth = engine.model.greedy(frozen.final[batch.predicting])
        count += len(truth)
        for depth in depths:
            guess = engine.model.greedy(frozen.residuals[depth][batch.predicting])
            agreed[depth] += int((guess == truth).sum())
    return {depth: right / count for depth, right in agreed.items()}


def candidates(system: str, stored: Mapping[str, Any]) -> list[Plan]:
    """Return four plans of a system around the one it was trained with."""
    if system == "draft":
        return [DraftPlan.chain(length) for length in (1, 2, 3, 4)]
    plan = cast(Any, plan_of(method_of(system), stored))
    chains = [replace(plan, widths=(1,) * length) for length in (1, 2, 3)]
    if method_of(system) in ("multirate", "deed"):
        return [*chains[1:], replace(plan, min_confidence=0.3), replace(plan, weights="bf16")]
    if method_of(system) == "multistream":
        return [*chains, replace(plan, widths=(2, 1, 1))]
    if method_of(system) == "eagle":
        return [*chains, replace(plan, min_confidence=0.3)]
    tree = (1, 3, 2) if system == "uno" else (3, 2, 1)  # the first guess of a block is the model's own
    return [*chains, replace(plan, widths=tree, nodes=4)]


def tuned(engines: Mapping[str, Engine], runs: Path, asked: Sequence[BenchmarkPrompt]) -> dict[str, Plan]:
    """Return the fastest plan of every system on some prompts; plans that were found before are read."""
    path = runs / PLANS
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found: dict[str, Plan] = {}
    for system, engine in engines.items():
        if system not in known:
            stored = {} if system == "draft" else _config(runs / system)["plan"]
            plans = candidates(system, stored)
            players = [
                Named(str(place), MethodSystem(method_of(system), planned(engine, plan), 32))
                for place, plan in enumerate(plans)
            ]
            records = run_benchmark(players, asked, repeats=1, warm_up=1)
            speeds = [one.tokens_per_s for one in summarise(records, "0")]
            known[system] = asdict(cast(Any, plans[speeds.index(max(speeds))]))
            path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        found[system] = plan_of(method_of(system), known[system])
    return found


def _config(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return read


def systems_in(runs: Path) -> list[str]:
    """Return the systems with weights in a folder: those of ``SYSTEMS``, then others that are named after one of their
    methods, such as ``multirate-gpu``.
    """
    found = sorted(path.parent.name for path in runs.glob(f"*/{FACTS}") if (path.parent / "config.json").is_file())
    others = [name for name in found if name not in SYSTEMS and method_of(name) in SYSTEMS]
    return [name for name in SYSTEMS if name in found] + others


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Tune every system that has weights in ``--runs`` and measure all of them by category."""
    runs: Path = given.runs
    origin = asdict(provenance(torch.device("cpu")))
    there = systems_in(runs)
    rounded = {"quantized": runs / "quantized"} if (runs / "quantized" / "config.json").is_file() else {}
    base = vivace.load(given.model, adapters=rounded)
    engines = {
        system: vivace.load(given.model, draft_model=runs / system)
        if system == "draft"
        else vivace.load(given.model, adapters={method_of(system): runs / system})
        for system in there
    }
    tuning = answered(base, load_prompts(given.tuning)[: given.tune_limit], 32)
    plans = tuned(engines, runs, tuning)
    players = [Named(name, MethodSystem(name, base, given.max_new_tokens)) for name in ("plain", *FREE)]
    for system in there:
        engine = planned(engines[system], plans[system])
        players.append(Named(system, MethodSystem(method_of(system), engine, given.max_new_tokens)))
        if method_of(system) == "multirate":
            players.append(Named(f"{system}+lookup", MethodSystem("multirate+lookup", engine, given.max_new_tokens)))
    report = report_of(base, load_prompts(given.prompts), given, lambda temperature: players)
    print(means(report))
    labels = {system: plan.label for system, plan in plans.items()}
    training = {
        system: json.loads((runs / system / FACTS).read_text(encoding="utf-8")) | {"plan": labels[system]}
        for system in there
    }
    return {
        **{"provenance": origin, "kernels": base.kernels.name, "threads": torch.get_num_threads()},
        **({} if given.answers is None else {"answers": _counted(given.answers)}),
        "about": json.loads((runs / ABOUT).read_text(encoding="utf-8")) if (runs / ABOUT).is_file() else {},
        "exits": json.loads((runs / EXITS).read_text(encoding="utf-8")),
        **{"tokens": given.max_new_tokens, "model": base.folder.name, "trainings": training},
        **{"adapters": {name: _config(folder)["plan"] for name, folder in rounded.items()}, "report": report},
    }


def _counted(answers: Path) -> dict[str, int]:
    """Return how many answers a file has, how many of them are to prompts that were given, and their tokens."""
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    return {
        "answers": len(rows),
        "given": sum(row["draw"] is None for row in rows),
        "tokens": sum(row["tokens"] for row in rows),
    }


def tables(folder: Path) -> str:
    """Return a table for each file that ``measure`` wrote: a row for each system, a column for each category."""
    parts = []
    for stem, written in read_named(folder):
        found = written["report"]
        names = [part["category"] for part in found]
        rows = [_row(at, written) for at in range(len(found[0]["runs"]))]
        rows = [rows[0], *sorted(rows[1:], key=lambda row: float(row[-2].rstrip("x")), reverse=True)]
        different = sum(run["num_different"] for part in found for run in part["runs"])
        busy = max(part["others_cpu_share"] or 0 for part in found)
        about = written.get("about", {})
        minutes = max(facts["minutes"] for system, facts in written["trainings"].items() if system not in about)
        rounding = "by GPTQ" if written["adapters"] else "one by one"
        text = "answers to prompts that the model drew"
        if (answers := written.get("answers")) is not None:
            is_all = answers["given"] == answers["answers"]
            count, others = (
                ("all", "") if is_all else (f"{answers['given']:,}", ", the others to prompts that the model drew")
            )
            text = (
                f"{answers['answers']:,} answers of {answers['tokens']:,} tokens, {count} of them to prompts of other "
                f"rows of the same sets (no conversations, no documents){others}"
            )
        parts.append(
            f"**{written['model']}**, greedy, batch 1, {found[0]['num_prompts']} prompts of each category, up to "
            f"{written['tokens']} tokens; trained for {minutes:.1f} minutes of a processor each on {text}; `quantized` "
            f"rounded {rounding} (`{stem}.json`). "
            f"{captions.machine(written['provenance'], written['kernels'], written['threads'])}"
            + captions.others({"others_cpu_share": busy})
            + f". {different} texts differ from plain decoding's."
        )
        parts += [f"`{system}`: {text}." for system, text in about.items()]
        parts.append(table(("system", "learnt from", "drafts", *names, "mean", "tokens a pass"), rows))
        parts.append("How often the untrained head names the model's token after so many of its layers:")
        parts.append(table(tuple(written["exits"]), [tuple(f"{share:.2f}" for share in written["exits"].values())]))
    return "\n\n".join(parts) or NO_RUN


def _row(at: int, written: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one system's row: what it learnt, its plan, its speed by category and in the mean, and tokens a pass."""
    runs = [part["runs"][at] for part in written["report"]]
    name = runs[0]["method"]
    facts = written["trainings"].get(name.partition("+")[0])
    learnt = "-" if facts is None else f"{facts['tokens']:,} tokens in {facts['steps']} steps"
    mean = sum(run["speedup"] for run in runs) / len(runs)
    kept = sum(run["tokens_per_target_pass"] or 1 for run in runs) / len(runs)
    plan = "-" if facts is None else facts["plan"]
    return f"`{name}`", learnt, plan, *(f"{run['speedup']:.2f}x" for run in runs), f"{mean:.2f}x", f"{kept:.2f}"
