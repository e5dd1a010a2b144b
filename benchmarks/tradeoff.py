"""Measure quality and cost of all methods: ``python -m benchmarks.tradeoff --runs DIR --prompts FILE --json OUT``.

One interleaved run on one task compares lossy methods at every agreement target they were calibrated for, exits at a
fixed layer with and without the accelerated residual, models fine-tuned for early exits, and the lossless methods.
All weights in ``--runs`` (``benchmarks/rivals.py``) or beside the base are used; methods without weights are named.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import captions, exit_plots
from benchmarks.result_files import NO_RUN, read_named, write_report
from benchmarks.rivals import ADAPTERS, WHOLE
from benchmarks.rivals_table import ROUTERS
from benchmarks.tradeoff_measures import Guessing, Point, Reading, costs, envelope, judge_texts, point
from vivace.cli.prompting import questions_of, read_prompts
from vivace.core.model import Decoder
from vivace.core.seams import Drafter
from vivace.core.step import Step
from vivace.decode.depth import Depth, EarlyExit, ExitThresholds
from vivace.decode.plain import NoDrafts
from vivace.decode.shallow import ShallowDrafter
from vivace.engine import Engine, load
from vivace.evaluate.benchmark import BenchmarkPrompt, Named, Record, run_benchmark, summarise
from vivace.evaluate.provenance import provenance
from vivace.evaluate.roofline import pass_bytes
from vivace.evaluate.systems import MethodSystem
from vivace.methods.dynamic.drafter import AcceleratedExit, DynamicDepth
from vivace.methods.table import METHODS
from vivace.prompts import Prompt

READS = {"bf16": (1.0, 1.0), "int8": (0.52, 0.52), "q4": (0.28, 0.52), "lut4": (0.28, 0.52)}
"""Shares of a layer's and of the head's bytes that a draft in such weights reads, scales included."""

FORMER_ROUTER = "mlp"
"""Router of the adapter that ships, for files that do not record it."""


@dataclass(frozen=True)
class Player:
    """A way to decode, with its engine."""

    named: Named
    engine: Engine
    lossless: bool


class FixedExit:
    """An ``ExitPolicy`` by which every token exits at one layer with the ordinary residual, the simplest early exit."""

    def __init__(self, layer: int) -> None:
        self.exit_layers = (layer,)

    def forward(self, model: Decoder, gate: int, h: Tensor, step: Step, asking: Tensor) -> EarlyExit:
        """Run the layers up to the exit, where all rows leave."""
        h = model.run(h, step, 0, self.exit_layers[0])
        return EarlyExit(h, torch.ones(len(asking), dtype=torch.bool), h[asking])


@dataclass(frozen=True)
class Only:
    """Stands in for ``Methods`` with a single drafter."""

    only: Drafter
    folder: Path | None

    def drafter(self, *asked: object) -> Drafter:
        """Return the only drafter."""
        return self.only


def players(engine: Engine, runs: Path | None, max_new_tokens: int) -> tuple[list[Player], list[str]]:
    """Return all ways to decode, plain first, and the lossy methods that lack weights."""
    found = [
        Player(Named(name, MethodSystem(name, engine, max_new_tokens)), engine, _is_lossless(name))
        for name in _sweep(engine)
    ]
    for name, drafter in _fixed(engine):
        alone = copy(engine)
        alone.methods = Only(drafter, engine.folder)  # type: ignore[assignment]
        found.append(Player(Named(name, MethodSystem("dynamic", alone, max_new_tokens)), engine, False))
    for kind, methods in WHOLE.items():
        if runs is not None and (runs / kind / "config.json").is_file():
            whole = load(runs / kind)
            names = [name for name in _sweep(whole) if name.partition("@")[0] in {m.partition("@")[0] for m in methods}]
            for name in ("plain", *(name for name in names if not _is_lossless(name))):
                shown = f"{name} on the {kind} model"
                found.append(Player(Named(shown, MethodSystem(name, whole, max_new_tokens)), whole, False))
    seen = {player.named.system.name.partition("@")[0] for player in found}
    lossy = [name for name, method in METHODS.items() if not method.lossless]
    return found, [name for name in lossy if name not in seen]


def _sweep(engine: Engine) -> list[str]:
    """Return the methods that are ready; those with early exits once for every agreement target."""
    names = ["plain"]
    for name in engine.methods.ready():
        if METHODS[name].has_quality:
            folder = engine.methods.adapter_folder(name)
            assert folder is not None
            plan = json.loads((folder / "config.json").read_text(encoding="utf-8"))["plan"]
            names += [f"{name}@{one['quality']:g}" for one in plan["qualities"]]
        elif name not in ("plain", "foresight"):
            names.append(name)
    return names


def _is_lossless(name: str) -> bool:
    """Return whether a method is lossless."""
    return METHODS[name.partition("@")[0]].lossless


def _fixed(engine: Engine) -> Iterator[tuple[str, Drafter]]:
    """Yield exits at fixed layers: at the quarters of the model, and at the gates of ``dynamic`` if it has weights."""
    layers = engine.model.config.num_layers
    for layer in sorted({max(1, layers * part // 4) for part in (1, 2, 3)}):
        yield f"exit at {layer}", NoDrafts(f"exit at {layer}", Depth(FixedExit(layer), missing="propagate"))
    if "dynamic" not in engine.methods.ready():
        return
    made = engine.methods.drafter("dynamic")
    assert isinstance(made, DynamicDepth)
    gates = made.weights.config.gates.layers
    for place, layer in enumerate(gates):
        opened = tuple(-1.0 if gate == place else None for gate in range(len(gates)))
        policy = AcceleratedExit(made.weights, ExitThresholds(0.5, opened))
        yield f"accelerated exit at {layer}", NoDrafts(f"exit at {layer}", Depth(policy, missing="propagate"))


def measure(engine: Engine, found: Sequence[Player], prompts: list[Prompt], repeats: int) -> list[Point]:
    """Answer every prompt in every way, in turns, one at a time, and return quality and cost."""
    asked = questions_of(engine, prompts, raw=False)
    records = run_benchmark([player.named for player in found], asked, repeats=repeats)
    runs = summarise(records, "plain")
    judged = [_judge(engine, prompts, asked, record) for record in records]
    base = reading_of(engine).pass_bytes
    points = []
    for player, record, run, told in zip(found, records, runs, judged, strict=True):
        passes, read = costs(record, reading_of(player.engine), guessing_of(player))
        points.append(point(run, player.lossless, (passes, read / base), told, judged[0]))
    return points


def _judge(engine: Engine, prompts: list[Prompt], asked: Sequence[BenchmarkPrompt], record: Record) -> Any:
    """Judge the answers of a record."""
    answers = [ids for trials in record.trials for ids in trials[0].token_ids]
    texts = [engine.tokenizer.decode(ids) for ids in answers]
    return judge_texts(engine, prompts, [question.token_ids for question in asked], answers, texts)


def reading_of(engine: Engine) -> Reading:
    """Return the bytes of a model's layers and head, in the precision it is stored in."""
    c = engine.model.config
    head = c.vocab_size * c.width * 2
    return Reading(c.num_layers, (pass_bytes(engine.model) - head) / c.num_layers, head)


def router_of(engine: Engine) -> str | None:
    """Return the kind of the router of ``dynamic``; None if it has no weights."""
    if "dynamic" not in engine.methods.ready():
        return None
    folder = engine.methods.adapter_folder("dynamic")
    assert folder is not None
    kind: str = json.loads((folder / "config.json").read_text(encoding="utf-8"))["config"]["router"]["kind"]
    return kind


def guessing_of(player: Player) -> Guessing | None:
    """Return how a method drafts with the layers below an exit layer; None for all others."""
    name = player.named.system.name.partition("@")[0]
    if not player.lossless or name in ("plain", "auto"):
        return None
    drafter = player.engine.methods.drafter(name)
    if not isinstance(drafter, ShallowDrafter):
        return None
    return Guessing(drafter.guess.exit_layer, *READS[drafter.plan.weights])


def table(report: Mapping[str, Any]) -> str:
    """Return the report as a Markdown table."""
    lines = [
        "| method | quality | change | nll | agreement | rows x layers | bytes read | speed | answers that differ |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["points"]:
        change, low, high = row["quality_change"]
        best = " *" if row["method"] in report["envelope"] else ""
        lines.append(
            f"| {row['method']}{best} | {row['quality']:.3f} | {change:+.3f} ({low:+.3f} to {high:+.3f}) | "
            f"{row['nll']:.3f} | {row['agreement']:.3f} | {row['layer_passes']:.1f} | {row['read_share']:.2f} | "
            f"{row['speedup']:.2f}x | {row['num_different']} of {report['num_prompts']} |"
        )
    return "\n".join(lines)


def tables(folder: Path) -> str:
    """Return the tables of every report in a folder.

    Raises:
        ValueError: the speeds of a report are of another processor than its answers.
    """
    parts = []
    for stem, report in read_named(folder):
        p = report.get("timed", report["provenance"])
        if p["cpu"] != report["provenance"]["cpu"]:
            raise ValueError(f"{stem}.json: answers of {report['provenance']['cpu']} beside speeds of {p['cpu']}")
        timed = f", speeds from {report['num_timed']} of them" if "num_timed" in report else ""
        parts.append(
            f"**{report['model']}, {report['prompts']}**: {report['num_prompts']:,} prompts{timed}, greedy, batch 1, "
            f"{captions.machine(p, report['kernels'])}. The router of `dynamic` is "
            f"{ROUTERS.get(report.get('router', FORMER_ROUTER), captions.NOT_RECORDED)}. "
            "Speed is that of decoding; of whole answers it was not recorded. A star marks what nothing beats in both "
            "quality and bytes read."
        )
        parts.append(table(report))
    return "\n\n".join(parts) or NO_RUN


def with_speeds(report: Mapping[str, Any], timed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report with the speeds of another one, which timed the same methods on fewer prompts.

    Raises:
        ValueError: the other lacks a method, or is of another model.
    """
    speeds = {row["method"]: row for row in timed["points"]}
    lacking = [row["method"] for row in report["points"] if row["method"] not in speeds]
    if lacking or timed["model"] != report["model"]:
        raise ValueError(f"not timed on {report['model']}: {', '.join(lacking) or 'any method'}")
    points = [
        row | {key: speeds[row["method"]][key] for key in ("speedup", "speedup_interval")} for row in report["points"]
    ]
    return {**report, "points": points, "num_timed": timed["num_prompts"], "timed": timed["provenance"]}


def main() -> None:
    """Measure, write the report and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--runs", type=Path, help="a folder per kind, as benchmarks.rivals leaves it")
    parser.add_argument("--prompts", default="e2e", help="rows of one task with references")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--methods", nargs="+", default=["*"], help="patterns of the names of those that take part")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--judged", type=Path, help="measure nothing: a report, its speeds from that of --timed")
    parser.add_argument("--timed", type=Path, help="a report of fewer prompts that the machine had to itself")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    if (given.judged is None) != (given.timed is None):
        parser.error("--judged and --timed go together")
    if given.judged and given.timed:
        reports = (json.loads(path.read_text(encoding="utf-8")) for path in (given.judged, given.timed))
        return _finish(with_speeds(*reports), given)
    beside = {
        kind: given.runs / kind for kind in ADAPTERS if given.runs and (given.runs / kind / "config.json").is_file()
    }
    engine = load(given.model, adapters=beside)
    prompts = read_prompts(given.prompts, given.limit)
    found, missing = players(engine, given.runs, given.max_new_tokens)
    found = [one for one in found if any(fnmatch(one.named.name, pattern) for pattern in ("plain", *given.methods))]
    points = measure(engine, found, prompts, given.repeats)
    report = {
        "provenance": asdict(provenance(engine.model.device)),
        "kernels": engine.kernels.name,
        "model": engine.folder.name,
        "prompts": Path(given.prompts).stem,
        "num_prompts": len(prompts),
        "router": router_of(engine),
        "left_out": missing,
        "envelope": envelope(points),
        "points": [asdict(one) for one in points],
    }
    _finish(report, given)


def _finish(report: Mapping[str, Any], given: argparse.Namespace) -> None:
    if given.json:
        write_report(given.json, report)
    if given.picture:
        exit_plots.draw_tradeoff(report, given.picture)
    print(table(report))
    if missing := report["left_out"]:
        print(f"left out, since there are no weights for them: {', '.join(missing)}")


if __name__ == "__main__":
    main()
