"""All methods in one interleaved run: ``python -m benchmarks.rivals [train|measure] --runs DIR ...``.

``train`` gives every rival the same data, minutes and two learning rates, finds the best draft of each with the search
of ``vivace tune``, and keeps the faster of the two. ``measure`` lets everything that lies in ``--runs`` play on the
given prompts, in turns, and writes a table and JSON. Rivals that need another model are set beside plain decoding of
their own model, for their text, and of the base, for their speed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import vivace
from vivace.cli.app import run
from vivace.cli.asking import questions_of, read_prompts
from vivace.engine import Engine
from vivace.evaluate.contest import Question, Record, Take, hold, summarise
from vivace.evaluate.entrants import Entrant
from vivace.evaluate.provenance import provenance
from vivace.evaluate.quality import score
from vivace.prompts import Prompt
from vivace.recipe import METHODS
from vivace.tuning import TUNED, candidates_of, describe, keep_plan, search

ADAPTERS = ("multirate", "multistream", "dynamic", "medusa", "eagle", "deed", "calm")
"""Kinds that lie beside the base, by the name of their folder in ``--runs``."""
WHOLE: Mapping[str, tuple[str, ...]] = {
    "layerskip": ("layerskip",),
    "supervised": ("layerskip", "lite@0.98"),
    "skipdecode": ("skipdecode",),
}
"""Kinds that are models of their own, and what is decoded with on each."""
TRAINED = ("medusa", "eagle", "deed", "draft")
RATES = {"layerskip": (0.0001, 0.0003), "supervised": (0.0001, 0.0003), "skipdecode": (0.0002,)}
"""Rates of AdamW that are tried, Muon's being five times as high; kinds beside the base have (0.001, 0.003)."""


@dataclass(frozen=True)
class Named:
    """Fills ``Contestant`` under a name of its own."""

    name: str
    entrant: Entrant

    def answer(self, batch: Sequence[Question]) -> Take:
        """Answer one batch, greedily."""
        return self.entrant.answer(batch)


def train(given: argparse.Namespace) -> None:
    """Every rival at two rates; the faster stays as ``RUNS/<kind>``, what was tried in ``RUNS/tuning.json``."""
    tried: list[dict[str, Any]] = []
    for kind in given.kinds or (*TRAINED, *WHOLE):
        speeds: dict[float, float] = {}
        for rate in RATES.get(kind, (0.001, 0.003)):
            out = given.runs / "tried" / f"{kind}-{rate:g}"
            if run(_training(kind, rate, out, given)) != 0:
                raise SystemExit(f"training {kind} failed")
            speeds[rate] = _tuned(kind, out, given, tried)
        best = max(speeds, key=lambda rate: speeds[rate])
        kept = given.runs / kind
        snapshots = shutil.ignore_patterns("run")
        shutil.copytree(given.runs / "tried" / f"{kind}-{best:g}", kept, dirs_exist_ok=True, ignore=snapshots)
        if kind == "supervised" and run(_calibrating(kept, given)) != 0:
            raise SystemExit(f"calibrating {kept} failed")
        (given.runs / "tuning.json").write_text(json.dumps(tried, indent=2) + "\n", encoding="utf-8")


def _training(kind: str, rate: float, out: Path, given: argparse.Namespace) -> list[str]:
    """The command that trains a kind."""
    words = ["train", kind, "--out", str(out), *(["--model", given.model] if given.model else [])]
    words += [word for path in given.data for word in ("--data", str(path))]
    if kind not in WHOLE:
        return [*words, f"loop.minutes={given.minutes}", f"optimiser.adamw_rate={rate}"]
    loop = f"{{minutes: {given.minutes}, warmup_steps: 50, hold: 0.1, evaluate_steps: 200}}"
    optimiser = f"{{muon_rate: {rate * 5:g}, adamw_rate: {rate:g}}}"
    return [*words, f"decoder.stages=[{{loop: {loop}, optimiser: {optimiser}}}]"]


def _calibrating(model: Path, given: argparse.Namespace) -> list[str]:
    """The command that finds LITE's thresholds on the model that was fine-tuned for it."""
    data = [word for path in given.data for word in ("--data", str(path))]
    return ["train", "lite", "--model", str(model), "--out", str(model / "adapters" / "lite"), *data]


def _tuned(kind: str, out: Path, given: argparse.Namespace, tried: list[dict[str, Any]]) -> float:
    """Tokens per second of the best draft; it is kept in the folder."""
    method = WHOLE[kind][0] if kind in WHOLE else kind
    engine = _loaded(given.model, {}, out) if kind in WHOLE else _loaded(given.model, {kind: out}, None)
    asked = questions_of(engine, read_prompts(given.prompts, given.tune_limit), raw=False)
    if method not in TUNED:
        return summarise(hold([Entrant(method, engine, 64)], asked, repeats=1), method)[0].tokens_per_s
    trials = search(engine, method, candidates_of(engine, method), asked, max_new_tokens=64)
    tried += [{"out": out.name, "plan": describe(t.plan), "prompts": t.num_prompts, **asdict(t.run)} for t in trials]
    if method != "draft":
        keep_plan(engine, method, trials[0].plan)
    return trials[0].run.tokens_per_s


def _loaded(model: str | None, kinds: Mapping[str, Path], whole: Path | None) -> Engine:
    """The base with some kinds beside it, or a whole model in its place."""
    if whole is not None:
        return vivace.load(whole)
    adapters = {kind: folder for kind, folder in kinds.items() if kind != "draft"}
    return vivace.load(model, adapters=adapters, draft_model=kinds.get("draft"))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Everything there is, in turns on the same prompts."""
    found = {kind: given.runs / kind for kind in (*ADAPTERS, "draft") if (given.runs / kind / "config.json").is_file()}
    base = _loaded(given.model, found, None)
    prompts = read_prompts(given.prompts, given.limit)
    asked = questions_of(base, prompts, raw=False)
    players = [Named(name, Entrant(name, base, given.max_new_tokens)) for name in _methods(base)]
    owners = dict.fromkeys((player.name for player in players), "plain")
    for kind, methods in WHOLE.items():
        if not (given.runs / kind / "config.json").is_file():
            continue
        engine = _loaded(None, {}, given.runs / kind)
        ready = [m for m in methods if m.partition("@")[0] in engine.methods.ready()]
        for method in ("plain", *ready):
            name = f"{method} on the {kind} model"
            owners[name] = f"plain on the {kind} model"
            players.append(Named(name, Entrant(method, engine, given.max_new_tokens)))
    records = hold(players, asked, repeats=given.repeats)
    return {
        "provenance": asdict(provenance(base.model.device)),
        "kernels": base.kernels.name,
        "prompts": given.prompts,
        "num_prompts": len(asked),
        "extra_bytes": _extra_bytes(base, found),
        "runs": [_row(record, records, owners, prompts, base) for record in records],
    }


def _methods(engine: Engine) -> list[str]:
    """Every method that is ready, plain first; those that leave early at their usual quality."""
    ready = [name for name in engine.methods.ready() if name not in ("plain", "skipdecode", "foresight")]
    return ["plain", *ready]


def _row(
    record: Record, records: Sequence[Record], owners: Mapping[str, str], prompts: Sequence[Prompt], engine: Engine
) -> dict[str, Any]:
    """Speed beside the base's plain decoding, sameness beside the own model's, and quality of the text."""
    speed = next(run for run in summarise(records, "plain") if run.method == record.name)
    own = next(run for run in summarise(records, owners[record.name]) if run.method == record.name)
    texts = [engine.tokenizer.decode(ids) for takes in record.takes for ids in takes[0].token_ids]
    quality = score(list(prompts), texts) if all(prompt.references for prompt in prompts) else None
    return {**asdict(speed), "identical": own.identical, "num_different": own.num_different, "quality": quality}


def _extra_bytes(engine: Engine, found: Mapping[str, Path]) -> dict[str, int]:
    """Of the weights beside the base, by kind."""
    folders = {kind: engine.methods.adapter_folder(kind) for kind in ADAPTERS} | dict(found)
    return {
        kind: sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        for kind, folder in folders.items()
        if folder is not None and folder.is_dir()
    }


def table(report: Mapping[str, Any]) -> str:
    """The report in Markdown."""
    lines = [
        "| method | extra MB | speed-up | tokens per pass | layers per token | text |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in report["runs"]:
        kind = row["method"].partition("@")[0]
        extra = report["extra_bytes"].get((METHODS[kind].adapter or kind) if kind in METHODS else kind, 0)
        low, high = row["speedup_interval"]
        layers = row["mean_exit_layer"]
        same = "same" if row["identical"] else f"{row['num_different']} of {report['num_prompts']} differ"
        lines.append(
            f"| {row['method']} | {extra / 1e6:.1f} | {row['speedup']:.2f}x ({low:.2f} to {high:.2f}) | "
            f"{row['tokens_per_target_pass'] or 1:.2f} | {'' if layers is None else f'{layers:.1f}'} | {same} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Train or measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("train", "measure"))
    parser.add_argument("--model")
    parser.add_argument("--runs", type=Path, required=True, help="a folder per kind")
    parser.add_argument("--data", type=Path, action="append", default=[], help="rows to train on, repeatable")
    parser.add_argument("--kinds", nargs="*", help="train only these")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--prompts", default="e2e", help="a .jsonl file or a packaged set")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--tune-limit", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.what == "train":
        train(given)
        return
    report = measure(given)
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(report))


if __name__ == "__main__":
    main()
