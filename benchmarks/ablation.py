"""Which part of M2R2's gain is its residual's: ``python -m benchmarks.ablation train|measure --runs DIR``.

``train`` makes eight drafters of the same exit layer, for equally many steps on the same answers of the model itself,
to prompts of ``--data`` and, where these are too few, prompts that it draws: with and without the accelerated
residual's low-rank terms, with and without feedback, with and without reach. Without all three a draft is a plain
exit with a trained factor per component. A killed run goes on. ``measure`` lets them draft in one interleaved run, each
further lever (quantized drafts, a draft vocabulary, several steps in a native call) added in turn, on the residual and
on the plain exit.

Intervals are bootstrap intervals over prompts.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import vivace
from benchmarks import captions
from tools.blocks import table
from vivace.cli.app import run
from vivace.cli.prompting import questions_of, read_prompts
from vivace.decode.shallow import DraftPlan
from vivace.evaluate.benchmark import BenchmarkPrompt, Record, Trial, run_benchmark, summarise
from vivace.evaluate.bootstrap import paired_bootstrap, ratio_of_sums
from vivace.evaluate.others import watched_others
from vivace.evaluate.provenance import provenance
from vivace.evaluate.systems import MethodSystem
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
GUESSES = 4
"""Guesses of a draft, the same for all."""
WORDS = 2048
"""Tokens of the draft vocabulary, half of the shipped model's."""
SHARED = ("loop.minutes=null", "loop.warmup_steps=10", "loop.evaluate_steps=100000", "tokens_per_batch=512")
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


@dataclass(frozen=True)
class _Named:
    """A system under the label of its row."""

    name: str
    system: MethodSystem

    def answer(self, batch: Sequence[BenchmarkPrompt]) -> Trial:
        """Answer one batch with greedy decoding."""
        return self.system.answer(batch)


def levers() -> list[Lever]:
    """Return the rows of the table."""
    chain = DraftPlan.chain(GUESSES)
    quantized = replace(chain, weights="q4")
    fewer = replace(quantized, vocabulary=WORDS)
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


def train(given: argparse.Namespace) -> None:
    """Train all parts that have no weights yet; the first draws the answers for all."""
    answers = given.runs / "own.jsonl"
    for name, changes in PARTS.items():
        out = given.runs / name
        if (out / "config.json").is_file():
            continue
        words = ["train", "multirate", "--out", str(out), f"loop.steps={given.steps}", *SHARED, "held_back=16"]
        if answers.exists():
            words += ["--answers", str(answers)]
        else:
            words += [f"own_tokens={TOKENS}", *(word for path in given.data for word in ("--data", str(path)))]
        if run([*words, *(["--model", given.model] if given.model else []), *changes]) != 0:
            raise SystemExit(f"training {name} failed")
        if not answers.exists():
            shutil.copyfile(out / "run" / "own.jsonl", answers)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure all rows in turns on the same prompts."""
    rows, players = levers(), list[_Named]()
    engines = {name: vivace.load(given.model, adapters={"multirate": given.runs / name}) for name in PARTS}
    base = engines["residual"]
    players.append(_Named("plain", MethodSystem("plain", base, given.max_new_tokens)))
    for row in rows:
        engine = planned(engines[row.parts], row.plan)
        engine.steps_per_call = None if row.is_one_call else 0
        players.append(_Named(row.label, MethodSystem("multirate", engine, given.max_new_tokens)))
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
    facts = {name: json.loads((given.runs / name / "config.json").read_text(encoding="utf-8")) for name in PARTS}
    return {
        "provenance": asdict(provenance(base.model.device)),
        "kernels": base.kernels.name,
        "model": base.folder.name,
        "steps": given.steps,
        "guesses": GUESSES,
        "repeats": given.repeats,
        "reach": facts["residual+reach"]["config"]["reach"],
        "exit_layer": facts["residual"]["config"]["exit_layer"],
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


def tables(path: Path) -> str:
    """Return the table of a file that ``measure`` wrote."""
    if not path.is_file():
        return "No run is committed yet."
    written = json.loads(path.read_text(encoding="utf-8"))
    parts = written["report"]
    columns = [f"{part['prompts']}: {what}" for part in parts for what in ("tokens a pass", "beside plain")]
    rows = []
    for at, one in enumerate(parts[0]["runs"][1:], 1):
        cells = [cell for part in parts for cell in _cells(part["runs"][at])]
        rows.append((one["method"], *cells))
    different = sum(run["num_different"] for part in parts for run in part["runs"])
    busy = max(part["others_cpu_share"] or 0 for part in parts)
    caption = (
        f"**{written['model']}**, exit layer {written['exit_layer']}, reach {written['reach']}, {written['steps']} "
        f"steps each, chains of {written['guesses']} guesses, {parts[0]['num_prompts']} prompts of each set, "
        f"{written['repeats']} repeats. {captions.machine(written['provenance'], written['kernels'])}"
        f"{captions.others({'others_cpu_share': busy})}. {different} texts differ from plain decoding's."
    )
    return f"{caption}\n\n{table(('drafts', *columns), rows)}"


def _cells(run: Mapping[str, Any]) -> tuple[str, str]:
    low, high = run["tokens_interval"]
    kept = f"{run['tokens_per_target_pass']:.2f} ({low:.2f} to {high:.2f})"
    return kept, "{:.2f}x ({:.2f} to {:.2f})".format(run["speedup"], *run["speedup_interval"])


def main() -> None:
    """Train or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "measure"))
    parser.add_argument("--model", help="the model that ships, if left out")
    parser.add_argument("--runs", type=Path, required=True, help="a folder for each part")
    parser.add_argument("--data", type=Path, action="append", default=[], help="prompts to answer before drawn ones")
    parser.add_argument("--steps", type=int, default=300)
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
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(tables(given.json))


if __name__ == "__main__":
    main()
