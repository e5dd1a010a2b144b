"""Measure early exits: ``python -m benchmarks.exits --adapter DIR --learn FILE --prompts FILE --out DIR``.

Writes ``exits.json`` (comparison of routers, agreement after calibration, velocity of residuals, and decoding at each
agreement target beside plain decoding) and draws ``velocity.svg`` and ``exits.svg`` from it.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import vivace
from benchmarks import exit_plots
from benchmarks.exit_measures import RouterTrial, compare_routers, velocities
from benchmarks.result_files import write_report
from vivace.checkpoint.adapters import load_adapter
from vivace.configuration import build
from vivace.engine import Engine
from vivace.evaluate.benchmark import BenchmarkPrompt, run_benchmark, summarise
from vivace.evaluate.provenance import provenance
from vivace.evaluate.quality import score
from vivace.evaluate.systems import MethodSystem
from vivace.methods.dynamic.drafter import DynamicConfig, DynamicWeights
from vivace.methods.dynamic.objective import RouterTraining, Trails, trails_of
from vivace.prompts import Prompt, load_prompts
from vivace.train.data import Rows, pairs_of

QUALITIES = (0.9, 0.95, 0.98, 0.99)
"""Agreement targets."""
KINDS = ("arla", "linear", "mlp", "gap", "cosine")
"""Kinds of routers."""


def weights_of(engine: Engine, folder: Path) -> DynamicWeights:
    """Load the gates and the router of an adapter."""
    written, tensors = load_adapter(folder)
    weights = DynamicWeights(build(DynamicConfig, written["config"]), engine.model.config)
    weights.load(tensors)
    weights.gates.to(engine.model.dtype).requires_grad_(False)
    return weights


def batches_of(engine: Engine, prompts: list[Prompt]) -> list[Any]:
    """Return batches of prompts with their first reference, padded together."""
    pairs = pairs_of([replace(prompt, references=prompt.references[:1]) for prompt in prompts])
    return Rows(engine.tokenizer, 256).batches(pairs, 2048)


def routers(engine: Engine, weights: DynamicWeights, learn: list[Prompt], held: list[Prompt]) -> list[dict[str, Any]]:
    """Compare all kinds of routers on the same positions; half of the held-out rows calibrate, the others evaluate."""
    config = weights.config.router

    def trails(prompts: list[Prompt]) -> Trails:
        parts = [trails_of(engine.model, weights.gates, config, batch) for batch in batches_of(engine, prompts)]
        return Trails.join(parts)

    half = len(held) // 2
    trial = RouterTrial(trails(learn), trails(held[:half]), trails(held[half:]))
    configs = [replace(config, kind=kind) for kind in KINDS]
    found = compare_routers(engine.model, weights.gates, configs, trial, lesson=RouterTraining(), qualities=QUALITIES)
    return [asdict(row) for row, _ in found]


def decoding(engine: Engine, prompts: list[Prompt], repeats: int) -> list[dict[str, Any]]:
    """Measure plain decoding and every agreement target on the same prompts, in turns: speed, exits and quality."""
    names = ["plain", *(f"dynamic@{quality:g}" for quality in QUALITIES)]
    asked = [BenchmarkPrompt(p.request, tuple(engine.tokenizer.encode_prompt(p.request))) for p in prompts]
    records = run_benchmark([MethodSystem(name, engine, 64) for name in names], asked, repeats=repeats)
    found = []
    for record, run in zip(records, summarise(records, "plain"), strict=True):
        texts = [engine.tokenizer.decode(ids) for trials in record.trials for ids in trials[0].token_ids]
        found.append({**asdict(run), "quality": score(prompts, texts)})
    return found


def main() -> None:
    """Measure, write the report and draw the plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--learn", type=Path, required=True, help="rows the gates have not seen, for the routers")
    parser.add_argument("--prompts", type=Path, required=True, help="dev rows with references")
    parser.add_argument("--limit", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    learn, held = load_prompts(given.learn), load_prompts(given.prompts)[: given.limit]
    torch.manual_seed(0)
    engine = vivace.load(given.model, adapters={"dynamic": given.adapter}, kernels="torch")
    weights = weights_of(engine, given.adapter)
    slow, fast = velocities(engine.model, weights.gates, batches_of(engine, held[:100]))
    report = {
        "provenance": asdict(provenance(engine.model.device)),
        "velocity": {"slow": asdict(slow), "accelerated": [asdict(one) for one in fast]},
        "routers": routers(engine, weights, learn, held),
    }
    native = vivace.load(given.model, adapters={"dynamic": given.adapter})
    report["num_layers"] = engine.model.config.num_layers
    report["kernels"] = native.kernels.name
    report["decoding"] = decoding(native, held, given.repeats)
    write_report(given.out / "exits.json", report)
    exit_plots.draw(report, given.out)


if __name__ == "__main__":
    main()
