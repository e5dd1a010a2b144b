"""Tables of weight formats beside other engines, with the speeds that were set as targets, and of their quality.

The targets were set for plain decoding on the models with random weights: 1.2 times llama.cpp's speed in the same
format, and 4 and 3.5 times transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import captions
from tools.blocks import table

PAIRS = (
    *(("vivace bf16", "llama.cpp", 1.2), ("vivace int8", "llama.cpp-q8_0", 1.2), ("vivace q4", "llama.cpp-q4_0", 1.2)),
    ("vivace bf16", "transformers", None),
)
"""Our engine, the other engine, and the target: how many times its speed; None takes it from `TRANSFORMERS`."""
UNEVEN = 1.5
"""How many times the slowest repeat the fastest may be for a verdict."""
TRANSFORMERS = {"100M": 4.0, "360M": 3.5}
"""The target beside transformers, by model."""


def tables(folder: Path) -> str:
    """Return a table for each file of ``benchmarks.peers``: our speed over theirs, the target, and whether it is
    met.
    """
    parts = []
    for path in sorted(folder.glob("peers*.json"), key=lambda path: (len(path.stem), path.stem)):
        report = json.loads(path.read_text(encoding="utf-8"))
        models = {name: found for name, found in report["models"].items() if name in TRANSFORMERS}
        kinds = sorted({found["kernels"] for found in models.values()})
        rows = [row for name, found in models.items() for row in _rows(name, found)]
        missed = sum(row[-1].startswith("**missed") for row in rows)
        parts += [
            f"{captions.heading(report['provenance'], ', '.join(kinds))}: {missed} of {len(rows)} bars are missed.",
            table(("model", "ours", "beside", "asked for", "while decoding", "whole answers", "bar"), rows),
        ]
    return "\n\n".join(parts) or "No result is committed yet."


def _rows(model: str, found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of one model."""
    runs = {run["method"]: run for run in found["runs"]}
    rows = []
    for ours, theirs, asked in PAIRS:
        bar = TRANSFORMERS[model] if asked is None else asked
        gain = runs[ours]["tokens_per_s"] / runs[theirs]["tokens_per_s"]
        whole = captions.whole_answers(runs[ours], runs[theirs])
        low, high = runs[theirs]["tokens_per_s_spread"]
        met = "met" if gain >= bar else "**missed**"
        if high > UNEVEN * low:
            met = f"no verdict: {theirs} ran at {low:.1f} to {high:.1f} tokens/s"
        rows.append((model, ours, theirs, f"{bar:g}x", f"{gain:.2f}x", f"{whole:.2f}x", met))
    return rows


def formats(folder: Path) -> str:
    """Return a table of memory and quality of every format for each file of ``vivace evaluate --json``."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        s = report["setting"]
        machine = captions.machine(report["provenance"], s["kernels"])
        parts += [
            f"**{s['model']}, {s['prompts'].removesuffix('.jsonl')}**: {s['num_prompts']:,} prompts, greedy; "
            f"{machine}.",
            table(HEADER, [row for found in report["weights"] for row in _format(found)]),
        ]
    return "\n\n".join(parts) or "No result is committed yet."


METRICS = {"bleu": "BLEU", "slot_error_rate": "slot errors", "exact_match": "exact match"}
"""Metrics in the tables, with their names there."""
HEADER = ("weights", "memory", "quality", "reference nll", "answer nll", "agreement", "same answers")


def _format(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of one format, one for each task."""
    rows = []
    for values in found["tasks"].values():
        shown = ", ".join(f"{label} {values[name]:.4g}" for name, label in METRICS.items() if name in values)
        rows.append(
            (
                found["weights"],
                f"{found['num_bytes'] / 2**20:.1f} MiB",
                shown,
                "-" if found["reference_nll"] is None else f"{found['reference_nll']:.4f}",
                f"{found['answer_nll']:.4f}",
                f"{found['agreement']:.2%}",
                f"{found['identical_share']:.0%}",
            )
        )
    return rows


def card(folder: Path, place: str = "quality") -> str:
    """Return a table of the quality of the weights as stored, with a row for each file of a folder of results."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        s, stored = report["setting"], next(found for found in report["weights"] if found["weights"] == "bf16")
        where = f"{captions.machine(report['provenance'], s['kernels'])}; `benchmarks/results/{place}/{path.name}`"
        which = "the first " if path.stem == "sql" else ""
        asked = f"{s['prompts'].removesuffix('.jsonl')}, {which}{s['num_prompts']:,}"
        for values in stored["tasks"].values():
            rows += [(asked, label, f"{values[name]:.4g}", where) for name, label in METRICS.items() if name in values]
    return table(("rows", "metric", "result", "measured"), rows) if rows else "No result is committed yet."


def quality_of(folder: Path, name: str, metric: str) -> float:
    """Return a metric of the weights as stored from the file ``name``."""
    report = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    stored = next(found for found in report["weights"] if found["weights"] == "bf16")
    return float(next(values[metric] for values in stored["tasks"].values()))
