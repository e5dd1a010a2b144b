"""Tables of beam search beside other engines, of files that ``vivace bench beams --json`` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import captions
from tools.blocks import table
from vivace.evaluate.beams import shares_of
from vivace.units import format_bytes

HEADER = (
    "prompts at once",
    "system",
    "inputs/s",
    "tokens/s",
    "ms a step",
    "vivace is",
    "other texts",
    "sources take",
    "peak",
    "encode/decode/select/text",
)


ABLATION = (
    *("with", "ms an input", "faster", "sources take"),
    *("largest batch in 2 GiB", "in 4 GiB", "in 8 GiB"),
    "texts unlike the first row's",
)


def tables(folder: Path) -> str:
    """Return a heading and a table for each file of speeds."""
    parts: list[str] = []
    for path in sorted(folder.glob("speed-*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        parts += [_heading(path, report), table(HEADER, _rows(report))]
    return "\n\n".join(parts) if parts else "No result is committed yet."


def ablation(folder: Path) -> str:
    """Return a heading and a table for each file that ``benchmarks.beam_ablation`` wrote."""
    parts: list[str] = []
    for path in sorted(folder.glob("ablation-*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        s = report["setting"]
        machine = captions.machine(report["provenance"], s["kernels"], s["threads"])
        parts += [
            f"**{s['model']}** in {s['dtype']}, from text to text: {s['num_prompts']} sources, {s['batch']} at once, "
            f"{s['num_beams']} beams, at most {s['max_new_tokens']} new tokens, no {s['no_repeat_ngram_size']}-gram "
            f"twice, pipeline with {s['workers']} processes, median of {s['repeats']}: {machine}; "
            f"`benchmarks/results/beams/{path.name}`.",
            table(ABLATION, [_part(one, report["rows"][0], s["num_prompts"]) for one in report["rows"]]),
        ]
    return "\n\n".join(parts) if parts else "No result is committed yet."


def ngrams(path: Path) -> str:
    """Return a sentence on the result of ``benchmarks.ngrams``."""
    if not path.is_file():
        return "No result is committed yet."
    report = json.loads(path.read_text(encoding="utf-8"))
    s, seconds = report["setting"], report["seconds"]
    return (
        f"Barring repeated {s['ngram']}-grams in {s['rows']} texts of {s['length']} tokens takes "
        f"{1e3 * seconds['vivace']:.2f} ms in one pass and {1e3 * seconds['transformers']:.1f} ms in transformers' "
        f"processor, {report['ratio']:.0f} times as long ({captions.machine(report['provenance'], 'torch')}; "
        f"`benchmarks/results/beams/{path.name}`)."
    )


def _part(one: dict[str, Any], first: dict[str, Any], count: int) -> tuple[str, ...]:
    batches = (f"{fits:,}" if fits else "-" for fits in one["largest_batch"].values())
    speed = f"{first['ms_per_input'] / one['ms_per_input']:.2f}x"
    return (
        *(one["label"], f"{one['ms_per_input']:,.0f}", speed, format_bytes(one["cross_cache_bytes"]), *batches),
        f"{one['num_different']} of {count}",
    )


def _heading(path: Path, report: dict[str, Any]) -> str:
    s = report["setting"]
    machine = captions.machine(report["provenance"], s["kernels"], s["threads"])
    return (
        f"**{s['model']}**, weights {s['weights']}, {s['num_beams']} beams, "
        f"{s['num_prompts']} prompts of {s['mean_prompt_tokens']:.0f} tokens "
        f"on average, at most {s['max_new_tokens']} new tokens, median of {s['repeats']}: {machine}; "
        f"`benchmarks/results/beams/{path.name}`."
    )


def _rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for size, systems in report["batches"].items():
        ours = systems[0]["inputs_per_s"]
        for one in systems:
            speeds = (f"{one[name]:.3g}" for name in ("inputs_per_s", "tokens_per_s", "ms_per_step"))
            taken = [format_bytes(one[name]) if one[name] else "-" for name in ("cross_cache_bytes", "peak_bytes")]
            ratio = f"{ours / one['inputs_per_s']:.2f}x"
            other = f"{one['num_different']} of {report['setting']['num_prompts']}"
            shares = shares_of(one["parts_s"])
            rows.append((size, f"{one['system']}, {one['dtype']}", *speeds, ratio, other, *taken, shares))
    return rows
