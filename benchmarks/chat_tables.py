"""Tables of drafts on chat by category, from files that ``benchmarks.chat_drafts run`` wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import captions
from benchmarks.decode_tables import Result, interval
from benchmarks.result_files import NO_RUN, read_named
from tools.blocks import table

BESIDE = ("system", "tokens/s", "beside plain", "first token", "whole answers", "tokens a pass", "weights", "texts")


def tables(folder: Path) -> str:
    """Return two tables for each file and temperature: speed by category, and how much of a draft is kept."""
    parts = []
    for stem, written in read_named(folder):
        for temperature in dict.fromkeys(part["temperature"] for part in written["report"]):
            found = [part for part in written["report"] if part["temperature"] == temperature]
            parts += [_caption(written, found, stem), _speeds(found), _tokens(found)]
    return "\n\n".join(parts) or NO_RUN


def regimes(folder: Path) -> str:
    """Return a table for each file of ``benchmarks.regimes``: every method, and ``auto`` beside the best of them."""
    parts = []
    for stem, written in read_named(folder):
        cells = written["report"]
        distances = [_of_best(part) for part in cells]
        near, above = sum(d >= 0.95 for d in distances), sum(_gain(part, "auto") >= 0.97 for part in cells)
        busy = max((part["others_cpu_share"] or 0 for part in cells), default=0)
        parts.append(
            f"**{written['model']}**, up to {written['tokens']} tokens (`{stem}.json`), drawn with top-p "
            f"{written['top_p']:g}; {_auto(written)}. {captions.machine(written['provenance'], written['kernels'], 0)}"
            f"{captions.others({'others_cpu_share': busy})}. `auto` within 5 % of the best fixed method in {near} of "
            f"{len(cells)} cells, at least .97x of plain in {above}; lowest {min(distances):.2f} of the best."
        )
        names = _methods(cells)
        rows = [
            (
                _regime(part),
                f"{part['runs'][0]['tokens_per_s']:.0f}/s",
                *(f"{_gain(part, name):.2f}x" for name in names[1:]),
                f"{distance:.2f}",
            )
            for part, distance in zip(cells, distances, strict=True)
        ]
        parts.append(table(("regime", *names, "auto of best"), rows))
    return "\n\n".join(parts) or NO_RUN


def _auto(written: Mapping[str, Any]) -> str:
    return f"`auto`: it has {'a run behind it' if written.get('remembered') else 'measured nothing before'}"


def _regime(part: Mapping[str, Any]) -> str:
    kind = "greedy" if part["temperature"] == 0 else f"temperature {part['temperature']:g}"
    threads = f"{part['threads']} thread{'s' * (part['threads'] > 1)}"
    return f"batch {part['batch']}, {kind}, prompts of {part['prompt_tokens']:.0f} tokens, {threads}"


def _gain(part: Mapping[str, Any], method: str) -> float:
    found: float = next(run["speedup"] for run in part["runs"] if run["method"] == method)
    return found


def _of_best(part: Mapping[str, Any]) -> float:
    """Return the speed of ``auto`` relative to the best of the other methods."""
    return _gain(part, "auto") / max(run["speedup"] for run in part["runs"] if run["method"] != "auto")


def beside_others(results: Sequence[Result]) -> str:
    """Return a table for each result of ``vivace bench decode`` with other programs in it."""
    parts = []
    for result in results:
        s = result.setting
        machine = captions.machine(result.provenance, s["kernels"])
        weights = "as stored" if s["weights"] == "bf16" else s["weights"]
        parts.append(
            f"**{s['model']}**, weights {weights}, {s['num_prompts']} packaged prompts, up to "
            f"{s['max_new_tokens']} tokens, {s['repeats']} repeats in turns (`{result.name}.json`). "
            f"{machine}{captions.others(s)}."
        )
        parts.append(table(BESIDE, [_beside(run, result.memory) for run in result.runs]))
    return "\n\n".join(parts) or NO_RUN


def _beside(run: Mapping[str, Any], memory: Mapping[str, Any] | None) -> tuple[str, ...]:
    held, first, a_pass = (
        (memory or {}).get("held", {}).get(run["method"]),
        run["first_token_ms"],
        run["tokens_per_target_pass"],
    )
    is_plain = run["method"] == "plain"
    return (
        f"`{run['method']}`",
        f"{run['tokens_per_s']:.0f}",
        "1.00x" if is_plain else interval(run),
        "-" if first is None else f"{first:.1f} ms",
        f"{run['end_to_end_speedup']:.2f}x",
        "-" if a_pass is None else f"{a_pass:.2f}",
        "-" if held is None else f"{(held['weights'] + held['drafter']) / 2**20:.0f} MiB",
        "-" if is_plain else "same" if run["identical"] else f"{run['num_different']} differ",
    )


def _caption(written: Mapping[str, Any], found: Sequence[Mapping[str, Any]], name: str) -> str:
    first = found[0]
    kind = "greedy" if first["temperature"] == 0 else f"temperature {first['temperature']:g}"
    counts = sorted({part["num_prompts"] for part in found})
    prompts = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    different = sum(run["num_different"] for part in found for run in part["runs"])
    busy = max((part["others_cpu_share"] or 0 for part in found), default=0)
    texts = f" {different} texts differ from plain decoding's." if first["temperature"] == 0 else ""
    auto = f" {_auto(written)}." if "auto" in _methods(found) else ""
    plans = "; ".join(f"{kind}: {_plan(plan)}" for kind, plan in written["adapters"].items())
    return (
        f"**{written['model']}**, {kind}, batch {first['batch']}, {prompts} prompts of each category, up to "
        f"{written['tokens']} tokens (`{name}.json`). "
        f"{captions.machine(written['provenance'], written['kernels'], written['threads'])}"
        f"{captions.others({'others_cpu_share': busy})}. {plans}.{auto}{texts}"
    )


def _plan(plan: Mapping[str, Any]) -> str:
    sure = f" while sure of {plan['min_confidence']:g}" if plan.get("min_confidence") else ""
    words = f" from {plan['vocabulary']:,} tokens" if plan.get("vocabulary") else ""
    return f"up to {len(plan['widths'])} guesses{sure}{words}, {plan.get('weights', 'bf16')}"


def _methods(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return [run["method"] for run in found[0]["runs"]]


def _speeds(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the speed of decoding relative to plain decoding, with bootstrap intervals over prompts."""
    rows = [
        (
            f"{part['category']} ({part['prompt_tokens']:.0f} tokens)",
            f"{part['runs'][0]['tokens_per_s']:.0f}/s",
            *(interval(run) for run in part["runs"][1:]),
        )
        for part in found
    ]
    count = len(_methods(found))
    means = [sum(part["runs"][at]["speedup"] for part in found) / len(found) for at in range(1, count)]
    whole = [sum(part["runs"][at]["end_to_end_speedup"] for part in found) / len(found) for at in range(1, count)]
    rows.append(("**mean**", "", *(f"**{mean:.2f}x**" for mean in means)))
    rows.append(("mean of whole answers", "", *(f"{mean:.2f}x" for mean in whole)))
    return table(("prompts", *_methods(found)), rows)


def _tokens(found: Sequence[Mapping[str, Any]]) -> str:
    """Return tokens for each pass of the model, by category."""
    kept = [
        (part["category"], *(f"{run['tokens_per_target_pass'] or 1:.2f}" for run in part["runs"][1:])) for part in found
    ]
    return table(("tokens a pass", *_methods(found)[1:]), kept)
