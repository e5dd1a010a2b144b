"""Measure streams on every node, behind the kept node, and Medusa: ``python -m benchmarks.stream_ways --json FILE``.

All of them draft for the packaged model in native calls of several steps, chains and trees alike, and answer packaged
prompts in turns with plain decoding. ``--more NAME=DIR`` adds streams that were trained for every node.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import vivace
from benchmarks import captions
from benchmarks.decode_tables import interval
from benchmarks.result_files import write_report
from tools.blocks import table
from vivace.cli.prompting import questions_of, read_prompts
from vivace.decode.tree import TreePlan
from vivace.engine import Engine
from vivace.evaluate.benchmark import Named, run_benchmark, summarise
from vivace.evaluate.provenance import provenance
from vivace.evaluate.systems import MethodSystem
from vivace.methods.multistream.config import StreamPlan
from vivace.tuning import planned

SHIPPED_INSERTION = 12
"""Layer at which the packaged streams start."""


def systems(more: Mapping[str, Path]) -> dict[str, tuple[Engine, str, str, int]]:
    """Return, by name: an engine, its method, how its drafts are attached, and layers that run for drafts alone."""
    shipped = vivace.load()
    layers = shipped.model.config.num_layers
    beside = layers - SHIPPED_INSERTION
    found = {
        "streams, chain of 3 behind the kept node in q4": (shipped, "multistream", "kept", beside),
        "streams, chain of 3 on every node": (planned(shipped, StreamPlan((1, 1, 1))), "multistream", "every", 0),
        "streams, tree 2-1-1 on every node": (planned(shipped, StreamPlan((2, 1, 1))), "multistream", "every", 0),
        "streams, tree 2-2-1 on every node": (planned(shipped, StreamPlan((2, 2, 1))), "multistream", "every", 0),
        "Medusa, chain of 4": (shipped, "medusa", "", 0),
        "Medusa, tree 2-1-1-1": (planned(shipped, TreePlan((2, 1, 1, 1))), "medusa", "", 0),
    }
    for name, folder in more.items():
        engine = vivace.load(adapters={"multistream": folder})
        for widths in ((1, 1, 1), (1, 1, 1, 1), (2, 1, 1, 1)):
            plan = StreamPlan(widths)
            found[f"{name}, {plan.label}"] = (planned(engine, plan), "multistream", "every", 0)
    return found


def measure(tasks: Sequence[str], limit: int, more: Mapping[str, Path]) -> dict[str, Any]:
    """Return what every system answered, task by task."""
    found = systems(more)
    engine = next(iter(found.values()))[0]
    rows: dict[str, Any] = {}
    for task in tasks:
        asked = questions_of(engine, read_prompts(task, limit), raw=False)
        players = [Named(name, MethodSystem(method, own, 64)) for name, (own, method, _, _) in found.items()]
        records = run_benchmark([Named("plain", MethodSystem("plain", engine, 64)), *players], asked, repeats=1)
        rows[task] = [asdict(row) for row in summarise(records, "plain")]
    return {
        "provenance": asdict(provenance(engine.model.device)),
        "kernels": engine.kernels.name,
        "num_prompts": limit,
        "layers": engine.model.config.num_layers,
        "systems": {name: {"attach": attach, "draft_layers": extra} for name, (_, _, attach, extra) in found.items()},
        "tasks": rows,
    }


def tables(path: Path) -> str:
    """Return the committed run as a table; nothing without one."""
    if not path.is_file():
        return ""
    report = json.loads(path.read_text(encoding="utf-8"))
    caption = (
        f"{captions.heading(report['provenance'], report['kernels'])}; {report['num_prompts']} prompts of each "
        "task that ship, batch 1, greedy, one run in turns. Every row drafts and verifies in native calls of several "
        "steps, trees too. Layers of a step: those of all rows that are verified, and those that run for drafts alone."
    )
    heads = ("prompts", "drafts", "tokens a step", "layers a step", "tokens for a whole pass of layers")
    rows = []
    for task, (_, *runs) in report["tasks"].items():
        for run in runs:
            extra, layers = report["systems"][run["method"]]["draft_layers"], report["layers"]
            tokens = run["tokens_per_target_pass"]
            rows.append(
                (
                    *(task, run["method"], f"{tokens:.2f}", f"{layers}{f' + {extra}' * bool(extra)}"),
                    f"{tokens * layers / (layers + extra):.2f}",
                    interval(run),
                    "same" if run["identical"] else "**differs**",
                )
            )
    return caption + "\n\n" + table((*heads, "beside plain", "text"), rows)


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", default=["e2e", "sql"])
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--more", nargs="*", default=[], help="NAME=DIR of streams trained for every node")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    more = {name: Path(folder) for name, _, folder in (each.partition("=") for each in given.more)}
    report = measure(given.tasks, given.limit, more)
    write_report(given.json, report)
    print(tables(given.json))


if __name__ == "__main__":
    main()
