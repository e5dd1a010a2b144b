"""Compare all methods in one interleaved run: ``python -m benchmarks.rivals train|tune|measure --runs DIR ...``.

``train`` trains every method with the same data, for the same minutes, at two learning rates, searches the best draft
of each like ``vivace tune``, and keeps the faster of the two. ``tune`` searches drafts for the weights already in
``--runs``, for those that ship and for methods without weights. ``measure`` runs all of them on the given prompts, in
turns, and writes JSON and a table (``benchmarks.report`` makes one from several files). Methods that need a model of
their own are compared with plain decoding of that model for their text, and of the base for their speed. ``own`` and
``chat`` train and measure on a chat model's own answers (``rivals_own.py``).
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import vivace
from benchmarks import rivals_own
from benchmarks.rivals_table import tables
from vivace.checkpoint.files import OWN_DRAFT
from vivace.cli.app import run
from vivace.cli.prompting import questions_of, read_prompts
from vivace.decode.shallow import DraftPlan
from vivace.engine import Engine
from vivace.evaluate.benchmark import Named, Record, run_benchmark, summarise
from vivace.evaluate.provenance import provenance
from vivace.evaluate.quality import score
from vivace.evaluate.step_layers import layers_of_step
from vivace.evaluate.systems import MethodSystem
from vivace.files import write_text
from vivace.methods.composition import plan_of
from vivace.methods.draft.drafter import DraftModel
from vivace.methods.dynamic.drafter import DynamicDepth
from vivace.methods.spec import Plan
from vivace.methods.table import METHODS
from vivace.prompts import Prompt
from vivace.train.resume import read_state
from vivace.tuning import candidates_of, keep_plan, planned, search, tuned_methods

Found = TypeVar("Found")

ADAPTERS = ("multirate", "multistream", "dynamic", "medusa", "eagle", "deed", "uno", "calm")
"""Methods with an adapter for the base, by the name of their folder in ``--runs``."""
WHOLE: Mapping[str, tuple[str, ...]] = {
    "layerskip": ("layerskip",),
    "supervised": ("layerskip", "lite@0.98"),
    "skipdecode": ("skipdecode",),
    "mod": ("mod",),
}
"""Kinds with a model of their own, and the methods that decode with it."""
TRAINED = ("medusa", "eagle", "deed", "uno", "draft")
"""Methods that ``train`` trains."""
RATES = {"layerskip": (0.0001, 0.0003), "supervised": (0.0001, 0.0003), "skipdecode": (0.0002,), "mod": (0.0002,)}
"""Learning rates of AdamW that are tried (Muon's are five times as high), for kinds with a model of their own.

Methods with an adapter try 0.001 and 0.003.
"""
VARIANTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "draft-free": ("draft", ("shape.num_layers=4", "shape.width=256", "shape.ffn_width=768", "shape.num_heads=8")),
    "multirate-brief": ("multirate", ()),
}
"""Further variants of a method with an adapter: the method, and what its recipe changes.

They are a draft model of four times the bytes, and the accelerated residual with no more training than the others.
"""
PLANS = "plans.json"
"""File in ``--runs`` with the tuned drafts of methods that have no folder there, by method."""
NEEDED: Mapping[str, tuple[str, ...]] = {"own": ("model", "answers"), "chat": ("model", "tuning", "json")}
"""Options without which nothing is begun."""
TRIALS = "tuning.json"
"""File in ``--runs`` with all drafts that were tried, and their speeds."""
FACTS = "training.json"
"""File in a folder of weights that records how long they were trained."""


def train(given: argparse.Namespace) -> None:
    """Train every kind at two rates; the faster is kept as ``RUNS/<kind>``, all trials in ``RUNS/tuning.json``."""
    tried = _known(given.runs / TRIALS, list[dict[str, Any]]())
    for kind in given.kinds or (*TRAINED, *VARIANTS, *WHOLE):
        speeds: dict[float, float] = {}
        for rate in given.rates or RATES.get(kind, (0.001, 0.003)):
            out = given.runs / "tried" / f"{kind}-{rate:g}"
            if run(_training(kind, rate, out, given)) != 0:
                raise SystemExit(f"training {kind} failed")
            speeds[rate] = _tuned(kind, out, given, tried)
        best = max(speeds, key=lambda rate: speeds[rate])
        kept = given.runs / kind
        snapshots = shutil.ignore_patterns("run")
        source = given.runs / "tried" / f"{kind}-{best:g}"
        shutil.copytree(source, kept, dirs_exist_ok=True, ignore=snapshots)
        _write(kept / FACTS, training_facts(source))
        if kind == "supervised" and run(_calibrating(kept, given)) != 0:
            raise SystemExit(f"calibrating {kept} failed")
        _write(given.runs / TRIALS, tried)


def _write(path: Path, content: object) -> None:
    """Write a value as JSON, into a folder that need not be there."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def _known(path: Path, nothing: Found) -> Found:
    """Return what an earlier call has written, to which this one adds."""
    if not path.is_file():
        return nothing
    found: Found = json.loads(path.read_text(encoding="utf-8"))
    return found


def training_facts(folder: Path) -> dict[str, float] | None:
    """Return steps and minutes of a training over all its stages, from the file beside the weights or from
    snapshots.
    """
    if (folder / FACTS).is_file():
        facts: dict[str, float] | None = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        return facts
    states = [read_state(path)["progress"] for path in sorted(folder.glob("run/**/state.pt"))]
    if not states:
        return None
    return {"steps": sum(s["step"] for s in states), "minutes": sum(s["elapsed_s"] for s in states) / 60}


def require_steps(folders: Iterable[Path], steps: int) -> None:
    """Refuse weights that were not trained for as many steps as the result will say; without snapshots nobody knows.

    Raises:
        SystemExit: a folder's training had other steps.
    """
    for folder in folders:
        facts = training_facts(folder)
        if facts is not None and facts["steps"] != steps:
            raise SystemExit(f"{folder} was trained for {facts['steps']} steps, and --steps says {steps}")


def tune(given: argparse.Namespace) -> None:
    """Search the best draft of every method: it is kept in its folder in ``--runs``, else in ``RUNS/plans.json``.

    With ``--kinds`` drafts of the others stay in the file.
    """
    tried = _known(given.runs / TRIALS, list[dict[str, Any]]())
    found, plans = _beside(given.runs), _known(given.runs / PLANS, dict[str, Any]()) if given.kinds else {}
    base = _loaded(given.model, found, None)
    for method in given.kinds or [name for name in tuned_methods() if name in base.methods.ready()]:
        best = _searched(base, method, method, given, tried)
        if method in found and method != "draft":
            keep_plan(base, method, best)
            plans.pop(method, None)  # of weights that were beside the model
        else:
            plans[method] = asdict(best)
        _write(given.runs / PLANS, plans)
        _write(given.runs / TRIALS, tried)
    for name in () if given.kinds else _variants(given.runs):
        method = _kind_of(name)
        engine = _loaded(given.model, {method: given.runs / name}, None)
        best = _searched(engine, method, name, given, tried)
        if method == "draft":
            plans[name] = asdict(best)
            _write(given.runs / PLANS, plans)
        else:
            keep_plan(engine, method, best)
    for kind in () if given.kinds else WHOLE:
        if (given.runs / kind / "config.json").is_file() and WHOLE[kind][0] in tuned_methods():
            engine = _loaded(None, {}, given.runs / kind)
            keep_plan(engine, WHOLE[kind][0], _searched(engine, WHOLE[kind][0], kind, given, tried))
    _write(given.runs / TRIALS, tried)


def _searched(engine: Engine, method: str, name: str, given: argparse.Namespace, tried: list[dict[str, Any]]) -> Plan:
    """Return the fastest draft of a method; all trials are added to ``tried`` under the given name."""
    asked = questions_of(engine, read_prompts(given.prompts, given.tune_limit), raw=False)
    trials = search(engine, method, candidates_of(engine, method), asked, max_new_tokens=64)
    tried[:] = [row for row in tried if row["out"] != name]  # those of an earlier search
    tried += [{"out": name, "plan": t.plan.label, "prompts": t.num_prompts, **asdict(t.run)} for t in trials]
    return trials[0].plan


def _kind_of(name: str) -> str:
    """Return the method of a variant."""
    return VARIANTS[name][0] if name in VARIANTS else name


def _variants(runs: Path) -> list[str]:
    """Return the variants that have been trained."""
    return [name for name in VARIANTS if (runs / name / "config.json").is_file()]


def _beside(runs: Path) -> dict[str, Path]:
    """Return the folders of methods with an adapter for the base."""
    return {kind: runs / kind for kind in (*ADAPTERS, "draft") if (runs / kind / "config.json").is_file()}


def _training(kind: str, rate: float, out: Path, given: argparse.Namespace) -> list[str]:
    """Return the command that trains a kind."""
    recipe, changes = VARIANTS.get(kind, (kind, ()))
    words = ["train", recipe, "--out", str(out), *(["--model", given.model] if given.model else [])]
    words += [word for path in given.data for word in ("--data", str(path))]
    if kind not in WHOLE:
        return [*words, f"loop.minutes={given.minutes}", f"optimiser.adamw_rate={rate}", *changes]
    loop = f"{{minutes: {given.minutes}, warmup_steps: 50, hold: 0.1, evaluate_steps: 200}}"
    optimiser = f"{{muon_rate: {rate * 5:g}, adamw_rate: {rate:g}}}"
    return [*words, f"decoder.stages=[{{loop: {loop}, optimiser: {optimiser}}}]"]


def _calibrating(model: Path, given: argparse.Namespace) -> list[str]:
    """Return the command that calibrates LITE's thresholds on the model that was fine-tuned for it."""
    data = [word for path in given.data for word in ("--data", str(path))]
    return ["train", "lite", "--model", str(model), "--out", str(model / "adapters" / "lite"), *data]


def _tuned(kind: str, out: Path, given: argparse.Namespace, tried: list[dict[str, Any]]) -> float:
    """Search the best draft, keep it in the folder, and return its tokens per second."""
    method = WHOLE[kind][0] if kind in WHOLE else _kind_of(kind)
    engine = _loaded(given.model, {}, out) if kind in WHOLE else _loaded(given.model, {method: out}, None)
    if method not in tuned_methods():
        asked = questions_of(engine, read_prompts(given.prompts, given.tune_limit), raw=False)
        return summarise(run_benchmark([MethodSystem(method, engine, 64)], asked, repeats=1), method)[0].tokens_per_s
    best = _searched(engine, method, out.name, given, tried)
    if method != "draft":
        keep_plan(engine, method, best)
    return max(row["tokens_per_s"] for row in tried if row["out"] == out.name and row["plan"] == best.label)


def _loaded(model: str | None, kinds: Mapping[str, Path], whole: Path | None) -> Engine:
    """Load the base with some adapters, or another model instead."""
    if whole is not None:
        return vivace.load(whole)
    adapters = {kind: folder for kind, folder in kinds.items() if kind != "draft"}
    return vivace.load(model, adapters=adapters, draft_model=kinds.get("draft"))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure all methods in turns on the same prompts."""
    found = _beside(given.runs)
    base = _loaded(given.model, found, None)
    prompts = read_prompts(given.prompts, given.limit)
    asked = questions_of(base, prompts, raw=False)
    plans = _known(given.runs / PLANS, dict[str, Any]())
    players, facts = list[Named](), dict[str, dict[str, Any]]()
    beside = [(name, name, base, _folder_of(name, base, found)) for name in _methods(base)]
    for name in _variants(given.runs):
        kind, folder = _kind_of(name), given.runs / name
        beside.append((name, kind, _loaded(given.model, {kind: folder}, None), folder))
    for name, method, engine, where in beside:
        engine = planned(engine, plan_of(method, plans[name])) if name in plans else engine
        players.append(Named(name, MethodSystem(method, engine, given.max_new_tokens)))
        facts[name] = _facts(engine, method, where) | {"plain": "plain"}
    for kind, methods in WHOLE.items():
        folder = given.runs / kind
        if not (folder / "config.json").is_file():
            continue
        engine = _loaded(None, {}, folder)
        for method in ("plain", *(m for m in methods if m.partition("@")[0] in engine.methods.ready())):
            name = f"{method} on the {kind} model"
            players.append(Named(name, MethodSystem(method, engine, given.max_new_tokens)))
            facts[name] = _facts(engine, method, folder) | {"plain": f"plain on the {kind} model"}
    records = run_benchmark(players, asked, repeats=given.repeats)
    return {
        "provenance": asdict(provenance(base.model.device)),
        "setting": {
            "model": base.folder.name,
            "kernels": base.kernels.name,
            "prompts": Path(given.prompts).stem,
            "num_prompts": len(asked),
            "max_new_tokens": given.max_new_tokens,
            "repeats": given.repeats,
        },
        "runs": [_row(record, records, facts[record.name], prompts, base) for record in records],
    }


def _methods(engine: Engine) -> list[str]:
    """Return every method that is ready, plain first; those with early exits have their default agreement target."""
    ready = [name for name in engine.methods.ready() if name not in ("plain", "skipdecode", "foresight")]
    return ["plain", *ready]


def _folder_of(method: str, engine: Engine, found: Mapping[str, Path]) -> Path | None:
    """Return the folder of a method's weights: in ``--runs``, or beside the model."""
    kind = METHODS[method].adapter or method
    own = engine.folder / OWN_DRAFT if kind == "draft" else engine.methods.adapter_folder(kind)
    return found.get(kind) or (own if own is not None and own.is_dir() else None)


def _facts(engine: Engine, name: str, folder: Path | None) -> dict[str, Any]:
    """Return what a method needs: bytes beside the base, training, and its draft."""
    method, _, quality = name.partition("@")
    drafter = engine.methods.drafter(method, quality=float(quality) if quality else None)
    plan = getattr(drafter, "plan", None)
    if isinstance(drafter, DraftModel):
        plan = DraftPlan.chain(drafter.config.num_draft_tokens)
    weights = [] if folder is None else folder.glob("*.safetensors")
    kept = METHODS[method].lossless and method != "auto"
    layers = layers_of_step(drafter, engine.model.config.num_layers) if kept else None
    return {
        "extra_bytes": sum(path.stat().st_size for path in weights),
        "layers_per_step": None if layers is None else {"verify": layers.verify, "draft": layers.draft},
        "router": drafter.weights.config.router.kind if isinstance(drafter, DynamicDepth) else None,
        "training": None if folder is None else training_facts(folder),
        "plan": getattr(plan, "label", None),
    }


def _row(
    record: Record, records: Sequence[Record], facts: Mapping[str, Any], prompts: Sequence[Prompt], engine: Engine
) -> dict[str, Any]:
    """Return speed beside the base's plain decoding, identity with its own model's plain text, and quality."""
    speed = next(run for run in summarise(records, "plain") if run.method == record.name)
    own = next(run for run in summarise(records, facts["plain"]) if run.method == record.name)
    texts = [engine.tokenizer.decode(ids) for trials in record.trials for ids in trials[0].token_ids]
    quality = score(list(prompts), texts) if all(prompt.references for prompt in prompts) else None
    same = {"identical": own.identical, "num_different": own.num_different}
    return {**asdict(speed), **same, "quality": quality, **facts}


def main() -> None:
    """Train, tune or measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("train", "tune", "measure", "own", "chat"))
    parser.add_argument("--model")
    parser.add_argument("--runs", type=Path, required=True, help="a folder per kind")
    parser.add_argument("--data", type=Path, action="append", default=[], help="rows to train on, repeatable")
    parser.add_argument("--kinds", nargs="*", help="train or tune only these")
    parser.add_argument("--rates", type=float, nargs="*", help="of AdamW, instead of two for each kind")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--prompts", default="e2e", help="a .jsonl file or a packaged set")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--tune-limit", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--answers", type=Path, help="own: the file of a model's own answers that all learn from")
    parser.add_argument("--device", default="auto", help="own: where to train")
    parser.add_argument("--change", action="append", default=[], help="own: KEY=VALUE or SYSTEM:KEY=VALUE, repeatable")
    parser.add_argument("--tuning", type=Path, help="chat: prompts to choose plans with")
    given = parser.parse_args()
    if lacking := [name for name in NEEDED.get(given.what, ()) if getattr(given, name) is None]:
        parser.error(f"{given.what} needs {', '.join(f'--{name}' for name in lacking)}")
    if given.what == "chat" and not (given.runs / rivals_own.EXITS).is_file():
        parser.error(f"{given.runs} has no {rivals_own.EXITS}: `own` writes it behind its trainings")
    if given.what == "own":
        rivals_own.train_equally(
            *(given.model, given.answers, given.runs, given.minutes, given.kinds or ()),
            device=given.device,
            changes=given.change,
        )
        return
    if given.what == "chat":
        given.temperatures, given.batch = [0.0], 1
        _write(given.json, rivals_own.measure(given))
        return
    if given.what == "train":
        train(given)
        return
    if given.what == "tune":
        tune(given)
        return
    report = measure(given)
    if given.json:
        _write(given.json, report)
    print(tables([report]))


if __name__ == "__main__":
    main()
