"""Does choosing a soft prompt help a rounded model? ``python -m benchmarks.prompt_pool MODEL FILE... --stored M ...``.

The experiment of arXiv:2310.00867 on task files that are judged by likelihood (``vivace data zeroshot``). MODEL is a
checkpoint in few bits of M, in front of which the members of ``--pool`` were learnt (``vivace train prompts``). Every
row is read by M as stored, by MODEL, by MODEL behind each member, by MODEL with each ``--lora NAME=DIR``, and by M
behind the member that its own first layer chooses: where that gains as much, the gain is no repair. From the rows
behind members follow those behind the one that the first layer chooses, by three ways of scoring, behind one drawn, and
behind the best for each row, which nobody knows beforehand.

The mean over tasks of the share of right answers (the likeliest option by byte; LAMBADA: the word that the model would
write) is compared with the rounded model and with the best single member. Intervals are paired and drawn task by task.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

import vivace
from benchmarks import captions
from benchmarks.result_files import tables_of, write_report
from tools.blocks import table
from vivace.adapters.pool.choice import Scoring, scores_of
from vivace.adapters.pool.pool import NONE
from vivace.engine import Engine
from vivace.evaluate.judging import JudgedSystem, marked, shared_context
from vivace.evaluate.provenance import provenance
from vivace.evaluate.zeroshot import TaskRow, load_task

STORED, ROUNDED = "stored", "rounded"
CHOSEN = "chosen"
DRAWS = 4000

Values = Mapping[str, NDArray[np.float64]]
"""One value a row, by task."""


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of every row of the table."""
    loras = dict(each.split("=", 1) for each in given.lora)
    stored = vivace.load(given.stored, prompt_pool=given.pool)
    rounded = vivace.load(given.model, prompt_pool=given.pool, adapters=loras)
    assert rounded.prompt_pool is not None
    members = {name: member.count for name, member in rounded.prompt_pool.members.items()}
    systems = [
        JudgedSystem(STORED, stored, soft_prompt=NONE),
        JudgedSystem(ROUNDED, rounded, soft_prompt=NONE),
        *(JudgedSystem(name, rounded, soft_prompt=name) for name in members),
        *(JudgedSystem(f"LoRA {name}", rounded, adapter=name) for name in loras),
        JudgedSystem(f"{STORED}, {CHOSEN}", stored),
    ]
    rows = [row for path in given.tasks for row in load_task(path, given.limit)]
    right: dict[str, dict[str, NDArray[np.float64]]] = {system.name: {} for system in systems}
    lost: dict[str, dict[str, NDArray[np.float64]]] = {system.name: {} for system in systems}
    for task, marks in marked(systems, rows):
        for system, own in zip(systems, marks, strict=True):
            right[system.name][task], lost[system.name][task] = np.array(own.right_by_byte), np.array(own.lost)
        print(task, {s.name: round(float(right[s.name][task].mean()), 4) for s in systems}, flush=True)
    chosen = choices(rounded, rows)
    for values, best in ((right, np.max), (lost, np.min)):
        by_member = {task: np.stack([values[name][task] for name in members]) for task in values[ROUNDED]}
        for way, places in chosen.items():
            values[way] = {task: each[places[task], np.arange(each.shape[1])] for task, each in by_member.items()}
        values["drawn"] = {task: each.mean(0) for task, each in by_member.items()}
        values["best for each row"] = {task: best(each, axis=0) for task, each in by_member.items()}
    single = max(members, key=lambda name: _mean(right[name]))
    counted = {way: Counter(int(place) for task in places.values() for place in task) for way, places in chosen.items()}
    return {
        "provenance": asdict(provenance(torch.device("cpu"))),
        "kernels": rounded.kernels.name,
        "prompt_pool": {
            "model": stored.folder.name,
            "rounded": rounded.folder.name,
            "rows": {task: len(each) for task, each in right[ROUNDED].items()},
            "members": members,
            "numbers": {
                "members": {name: count * rounded.model.config.width for name, count in members.items()},
                "loras": {name: _numbers(Path(folder)) for name, folder in loras.items()},
            },
            "best_member": single,
            "systems": {
                name: {
                    "right": _mean(values),
                    "by_task": {task: float(each.mean()) for task, each in values.items()},
                    "against_rounded": interval(values, right[ROUNDED]),
                    "against_best_member": interval(values, right[single]),
                    "nats": _mean(lost[name]),
                    "nats_against_rounded": interval(lost[name], lost[ROUNDED]),
                    "nats_against_best_member": interval(lost[name], lost[single]),
                }
                for name, values in right.items()
            },
            "choices": {
                way: {name: count[place] for place, name in enumerate(members)} for way, count in counted.items()
            },
        },
    }


def _mean(values: Values) -> float:
    """Return the mean over tasks of the mean over rows."""
    return float(np.mean([each.mean() for each in values.values()]))


def _numbers(folder: Path) -> int:
    """Return how many numbers a LoRA's factors have."""
    return sum(factor.numel() for factor in load_file(folder / "adapter_model.safetensors").values())


@torch.inference_mode()
def choices(engine: Engine, rows: Sequence[TaskRow]) -> dict[str, dict[str, NDArray[np.int64]]]:
    """Return which member every row gets, by way of choosing and task.

    "over its mean" divides a member's score by its mean over all rows, so that no member is chosen for its keys alone.
    """
    assert engine.prompt_pool is not None
    keys = [member.keys for member in engine.prompt_pool.members.values()]
    contexts = [shared_context(row, engine.tokenizer) for row in rows]
    ways: dict[str, NDArray[np.int64]] = {}
    scorings: tuple[Scoring, ...] = ("joint", "standalone")
    for scoring in scorings:
        scores = np.array([scores_of(engine.model, context, keys, scoring) for context in contexts])
        ways[CHOSEN if scoring == "joint" else f"{CHOSEN}, {scoring}"] = scores.argmax(1)
        if scoring == "joint":
            ways[f"{CHOSEN}, over its mean"] = (scores / scores.mean(0)).argmax(1)
    tasks = np.array([row.task for row in rows])
    return {way: {task: places[tasks == task] for task in dict.fromkeys(tasks)} for way, places in ways.items()}


def interval(one: Values, other: Values, seed: int = 0) -> dict[str, float]:
    """Return the mean over tasks of paired differences, with a 95 % interval: rows are drawn within each task."""
    generator = np.random.default_rng(seed)
    differences = [one[task] - other[task] for task in one]
    drawn = [each[generator.integers(len(each), size=(DRAWS, len(each)))].mean(1) for each in differences]
    low, high = np.percentile(np.mean(drawn, axis=0), [2.5, 97.5])
    return {"mean": float(np.mean([each.mean() for each in differences])), "low": float(low), "high": float(high)}


def tables(folder: Path) -> str:
    """Return the tables of all result files of a folder."""
    return tables_of(folder, _tables)


def _tables(written: Mapping[str, Any]) -> list[str]:
    p = written["prompt_pool"]
    sizes = ", ".join(f"`{name}` ({count})" for name, count in p["members"].items())
    caption = (
        f"**{p['model']}**, rounded as `{p['rounded']}`; {sum(p['rows'].values()):,} development rows of "
        f"{len(p['rows'])} tasks, at most {max(p['rows'].values()):,} of each; members (entries): {sizes}. Points: "
        "share of right answers, mean over tasks; nats: of the right answer, a row. Paired 95 % intervals. "
        f"{captions.machine(written['provenance'], written['kernels'])}."
    )
    rows = [
        (
            name,
            f"{one['right']:.2%}",
            _signed(one["against_rounded"], 100, 2),
            _signed(one["against_best_member"], 100, 2),
            _signed(one["nats_against_rounded"], 1, 3),
            _signed(one["nats_against_best_member"], 1, 3),
        )
        for name, one in p["systems"].items()
    ]
    heads = (
        "",
        "right",
        "points against rounded",
        f"points against `{p['best_member']}`",
        "nats against rounded",
        f"nats against `{p['best_member']}`",
    )
    by_task = [
        (task, str(count), *(f"{p['systems'][name]['by_task'][task]:.1%}" for name in _shown(p)))
        for task, count in p["rows"].items()
    ]
    counts = "; ".join(
        f"{way}: {', '.join(f'`{name}` {count:,}' for name, count in found.items())} "
        f"({_entropy(found.values()):.2f} bits)"
        for way, found in p["choices"].items()
    )
    numbers = {**p["numbers"]["members"], **{f"LoRA {name}": n for name, n in p["numbers"]["loras"].items()}}
    trained = ", ".join(f"`{name}` {count:,}" for name, count in numbers.items())
    return [
        caption,
        table(heads, rows),
        f"Choices, with their entropy: {counts}. Trained numbers: {trained}.",
        table(("task", "rows", *_shown(p)), by_task),
    ]


def _shown(p: Mapping[str, Any]) -> list[str]:
    return [STORED, ROUNDED, p["best_member"], CHOSEN, *(f"LoRA {name}" for name in p["numbers"]["loras"])]


def _entropy(counts: Iterable[int]) -> float:
    """Return the entropy of choices, in bits."""
    shares = np.array([count for count in counts if count], dtype=np.float64)
    shares /= shares.sum()
    return float((shares * np.log2(1 / shares)).sum())


def _signed(found: Mapping[str, float], scale: float, digits: int) -> str:
    mean, low, high = (f"{scale * found[key]:+.{digits}f}" for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def main() -> None:
    """Measure and write a result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoint in few bits")
    parser.add_argument("tasks", type=Path, nargs="+", help="task files")
    parser.add_argument("--stored", type=Path, required=True, help="the model that it was made of")
    parser.add_argument("--pool", type=Path, required=True)
    parser.add_argument("--lora", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--limit", type=int, help="rows of each task")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    report = measure(given)
    write_report(given.json, report)
    print("\n\n".join(_tables(report)))


if __name__ == "__main__":
    main()
