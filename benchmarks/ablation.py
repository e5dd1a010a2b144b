"""Which part of M2R2's gain is its residual's: ``python -m benchmarks.ablation train|measure --runs DIR``.

``train`` makes eight drafters of the same exit layer, in turn, for equally many steps on the same answers of the model
itself, to prompts of ``--data`` and, where these are too few, prompts that it draws: with and without the accelerated
residual's low-rank terms, with and without feedback, with and without reach. Without all three a draft is a plain
exit with a trained factor per component. A killed run goes on. ``measure`` lets them draft in one interleaved run, each
further lever (quantized drafts, a draft vocabulary, several steps in a native call) added in turn, on the residual and
on the plain exit.

``--only`` takes some of the eight, and the rows of these, where a step takes long. ``--set shapes`` compares exit
layers and ranks instead. Intervals are bootstrap intervals over prompts.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import vivace
from benchmarks import captions
from benchmarks.in_turn import learn_in_turn
from benchmarks.result_files import tables_of, write_report
from benchmarks.rivals import require_steps
from tools.blocks import table
from vivace.cli.prompting import questions_of, read_prompts
from vivace.decode.shallow import DraftPlan
from vivace.evaluate.benchmark import Named, Record, run_benchmark, summarise
from vivace.evaluate.bootstrap import paired_bootstrap, ratio_of_sums
from vivace.evaluate.others import watched_others
from vivace.evaluate.provenance import provenance
from vivace.evaluate.systems import MethodSystem
from vivace.prompts import load_prompts
from vivace.recipes.own_text import Budget, own_text
from vivace.train.data import questions_of as data_questions
from vivace.tuning import planned

PARTS: Mapping[str, tuple[str, ...]] = {
    "exit": ("adapter.rank=0", "adapter.bottleneck=0", "adapter.feedback=false", "find_reach=0"),
    "exit+feedback": ("adapter.rank=0", "adapter.bottleneck=0", "find_reach=0"),
    "exit+reach": ("adapter.rank=0", "adapter.bottleneck=0", "adapter.feedback=false"),
    "exit+feedback+reach": ("adapter.rank=0", "adapter.bottleneck=0"),
    "residual": ("adapter.feedback=false", "find_reach=0"),
    "residual+feedback": ("find_reach=0",),
    "residual+reach": ("adapter.feedback=false",),
    "residual+feedback+reach": (),
}
"""What is trained, and what each changes in the recipe of ``multirate``."""
SHAPES: Mapping[str, tuple[str, ...]] = {
    **{f"exit layer {layer}": (f"adapter.exit_layer={layer}",) for layer in (2, 3, 4, 5, 6)},
    **{f"rank {rank}": (f"adapter.rank={rank}", f"adapter.bottleneck={8 * rank}") for rank in (8, 96)},
}
"""Exit layers and ranks that are compared, with feedback and reach; what is not said is the recipe's. Bottlenecks have
eight times the rank."""
SETS = {"parts": PARTS, "shapes": SHAPES}
GUESSES = 4
"""Guesses of a draft, the same for all."""
SHARED = (
    *("loop.minutes=null", "loop.warmup_steps=10", "loop.evaluate_steps=100000", "loop.autocast=true"),
    *("loop.accumulate=1", "tokens_per_batch=512", "held_back=16"),
)
LONGEST = 512
"""Tokens of a row."""
TOKENS = 40_000
"""Tokens of the answers to learn from."""


@dataclass(frozen=True)
class Lever:
    """How drafts are made with trained parts."""

    label: str
    parts: str
    plan: DraftPlan
    is_one_call: bool
    """Whether a native call makes and verifies several steps."""


def shapes() -> list[Lever]:
    """Return the rows of the table of exit layers and ranks, drafting as fast as it goes."""
    chain = DraftPlan((1,) * GUESSES, weights="q4")
    return [Lever(name, name, chain, True) for name in SHAPES]


def levers(words: int) -> list[Lever]:
    """Return the rows of the table; ``words`` is the size of the draft vocabulary where one is a lever."""
    chain = DraftPlan.chain(GUESSES)
    quantized = replace(chain, weights="q4")
    fewer = replace(quantized, vocabulary=words)
    rows = []
    for base, title in (("residual", "accelerated residual"), ("exit", "plain early exit")):
        full = f"{base}+feedback+reach"
        rows += [
            Lever(title, base, chain, False),
            Lever(f"{title} + feedback", f"{base}+feedback", chain, False),
            Lever(f"{title} + reach", f"{base}+reach", chain, False),
            Lever(f"{title} + feedback + reach", full, chain, False),
            Lever(f"{title} + both + q4", full, quantized, False),
            Lever(f"{title} + both + q4 + draft vocabulary", full, fewer, False),
            Lever(f"{title} + all, several steps a call", full, fewer, True),
            Lever(f"{title} alone, q4", base, quantized, False),
            Lever(f"{title} alone, several steps a call", base, chain, True),
        ]
    return rows


def parts_of(given: argparse.Namespace) -> Mapping[str, tuple[str, ...]]:
    """Return what is trained and measured, and what each changes in the recipe.

    Raises:
        SystemExit: the set has no such part.
    """
    every = SETS[given.set]
    unknown = [name for name in given.only if name not in every]
    if unknown:
        raise SystemExit(f"--only: {unknown[0]!r} is none of {', '.join(every)}")
    return {name: every[name] for name in given.only} if given.only else every


def train(given: argparse.Namespace) -> None:
    """Train all parts that have no weights yet, in turn on the same batches; first the answers for all are written."""
    engine, path = vivace.load(given.model, kernels="torch"), given.runs / "own.jsonl"
    if given.answers is not None:
        path = given.answers
    elif not path.exists():
        asked = sorted(set(data_questions([row for name in given.data for row in load_prompts(name)])))
        random.Random(0).shuffle(asked)
        own_text(vivace.load(given.model), path, Budget(TOKENS), LONGEST, asked, print)
    exits = () if given.exit_layer is None else (f"adapter.exit_layer={given.exit_layer}",)
    shared = (f"loop.steps={given.steps}", *SHARED, f"longest={LONGEST}", f"plan.vocabulary={given.vocabulary}", *exits)
    parts = {given.runs / name: ("multirate", [*shared, *part]) for name, part in parts_of(given).items()}
    learn_in_turn(engine, path, parts)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure all rows in turns on the same prompts."""
    parts, players = parts_of(given), list[Named]()
    require_steps((given.runs / name for name in parts), given.steps)
    rows = [row for row in (levers(given.words) if given.set == "parts" else shapes()) if row.parts in parts]
    engines = {name: vivace.load(given.model, adapters={"multirate": given.runs / name}) for name in parts}
    base = next(iter(engines.values()))
    players.append(Named("plain", MethodSystem("plain", base, given.max_new_tokens)))
    for row in rows:
        engine = planned(engines[row.parts], row.plan)
        engine.steps_per_call = None if row.is_one_call else 0
        players.append(Named(row.label, MethodSystem("multirate", engine, given.max_new_tokens)))
    report = []
    for prompts in given.prompts:
        asked = questions_of(base, read_prompts(prompts, given.limit), raw=False)
        with watched_others() as others:
            records = run_benchmark(players, asked, repeats=given.repeats)
        runs = {run.method: asdict(run) for run in summarise(records, "plain")}
        for record in records[1:]:
            runs[record.name]["tokens_interval"] = _tokens(record)
        head = {"prompts": Path(prompts).stem, "num_prompts": len(asked), "others_cpu_share": others.cpu_share}
        report.append({**head, "runs": list(runs.values())})
    config = json.loads((given.runs / [*parts][-1] / "config.json").read_text(encoding="utf-8"))["config"]
    return {
        "provenance": asdict(provenance(base.model.device)),
        "kernels": base.kernels.name,
        "model": base.folder.name,
        "steps": given.steps,
        "guesses": GUESSES,
        "vocabulary": given.words,
        "repeats": given.repeats,
        "reach": config["reach"],
        "exit_layer": config["exit_layer"] if given.set == "parts" else None,
        "report": report,
    }


def _tokens(record: Record) -> tuple[float, float]:
    """Return the bootstrap interval over prompts of tokens a pass."""
    first = [trials[0] for trials in record.trials]
    found = paired_bootstrap(
        [float(trial.num_tokens) for trial in first],
        [float(trial.num_steps) for trial in first],
        statistic=ratio_of_sums,
    )
    return found.low, found.high


def tables(folder: Path) -> str:
    """Return the tables of all files that ``measure`` wrote into a folder."""
    return tables_of(folder, _tables)


def _tables(written: Mapping[str, Any]) -> list[str]:
    parts = written["report"]
    columns = [f"{part['prompts']}: {what}" for part in parts for what in ("tokens a pass", "beside plain")]
    rows = []
    for at, one in enumerate(parts[0]["runs"][1:], 1):
        cells = [cell for part in parts for cell in _cells(part["runs"][at])]
        rows.append((one["method"], *cells))
    different = sum(run["num_different"] for part in parts for run in part["runs"])
    busy = max(part["others_cpu_share"] or 0 for part in parts)
    place = "" if written["exit_layer"] is None else f"exit layer {written['exit_layer']}, "
    words = "" if written["exit_layer"] is None else f"draft vocabulary of {written['vocabulary']:,} tokens, "
    caption = (
        f"**{written['model']}**, {place}reach {written['reach']}, {written['steps']} "
        f"steps each, chains of {written['guesses']} guesses, {words}"
        f"{parts[0]['num_prompts']} prompts of each set, {written['repeats']} repeats. "
        f"{captions.machine(written['provenance'], written['kernels'])}{captions.others({'others_cpu_share': busy})}. "
        f"{different} texts differ from plain decoding's."
    )
    return [caption, table(("drafts", *columns), rows)]


def _cells(run: Mapping[str, Any]) -> tuple[str, str]:
    low, high = run["tokens_interval"]
    kept = f"{run['tokens_per_target_pass']:.2f} ({low:.2f} to {high:.2f})"
    return kept, "{:.2f}x ({:.2f} to {:.2f})".format(run["speedup"], *run["speedup_interval"])


def main() -> None:
    """Train or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "measure"))
    parser.add_argument("--set", choices=tuple(SETS), default="parts", help="what is compared")
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="parts to compare; all, if left out")
    parser.add_argument("--model", help="the model that ships, if left out")
    parser.add_argument("--runs", type=Path, required=True, help="a folder for each part")
    parser.add_argument("--data", type=Path, action="append", default=[], help="prompts to answer before drawn ones")
    parser.add_argument("--answers", type=Path, help="answers that another training had written; none are drawn")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--exit-layer", type=int, help="of all parts; left out: the recipe's")
    parser.add_argument("--vocabulary", type=int, default=0, help="tokens that are learnt to be guessed; 0 is all")
    parser.add_argument("--words", type=int, default=2048, help="tokens of the draft vocabulary where it is a lever")
    parser.add_argument("--prompts", nargs="*", default=["e2e", "sql"])
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.what == "train":
        train(given)
        return
    report = measure(given)
    if given.json is not None:
        write_report(given.json, report)
        print("\n\n".join(_tables(report)))


if __name__ == "__main__":
    main()
