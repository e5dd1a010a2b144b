"""Tables of palettes: what few bits lose (``palette_quality``) and how fast they are read (``palette_kernels``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import captions
from benchmarks.result_files import NO_RUN, read_named
from tools.blocks import table
from vivace.units import format_bytes

BEFORE = "k-means, weighted"
"""The way whose losses others win back."""
JUDGED_HEADS = ("choices right, stored", "perplexity, stored", "nats won back", "points won back")


def quality(folder: Path) -> str:
    """Return a table for each file of ``benchmarks.palette_quality``: bits beside divergence, loss and choices."""
    parts = []
    for stem, written in read_named(folder):
        setting, ways = written["setting"], written["ways"]
        stored = next(iter(ways.values()))["stored_loss"]
        parts.append(
            f"**{setting['model']}**, rounded on {setting['tokens']:,} tokens of {', '.join(setting['data'])}, judged "
            f"on an eighth as many held back; stored loss {stored:.4f} (`{stem}.json`). "
            f"{captions.machine(written['provenance'], written['provenance']['best_kernels'])}."
        )
        heads = ("way", "bits of a matrix", "bits of everything", "KL to stored", "loss beside stored")
        is_judged = any("judgements" in way for way in ways.values())
        lost = ways.get(BEFORE, {})
        rows = [(*_row(name, way, stored), *(_judged(way, lost) if is_judged else ())) for name, way in ways.items()]
        parts.append(table((*heads, *(JUDGED_HEADS if is_judged else ())), rows))
        if is_judged:
            parts.append(_judged_on(ways))
    return "\n\n".join(parts) or NO_RUN


def _row(name: str, way: Mapping[str, Any], stored: float) -> tuple[str, ...]:
    bits = f"{way['matrix_bits']:.2f}", f"{way['all_bits']:.2f}"
    if way["kl"] is None:
        return name, *bits, "", ""
    return name, *bits, f"{way['kl']:.4f}", f"{way['loss'] - stored:+.4f}"


def _judged(way: Mapping[str, Any], lost: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return the mean share of right choices and the perplexity of texts, beside the stored model's, and how much of
    what ``BEFORE`` has lost of each is won back.
    """
    if "judgements" not in way:
        return "", "", "", ""
    texts = [
        f"{own['perplexity']:.1f}, {way['stored_perplexity'][own['task']]:.1f}"
        for own in way["judgements"]
        if own["perplexity"] is not None and own["accuracy"] is None
    ]
    choices = ""
    if way["mean_accuracy"] is not None:
        choices = f"{way['mean_accuracy']:.1%}, {way['stored_accuracy']:.1%}{_change(way)}"
    nats, points = (_won_back(of(way), of(lost)) for of in (_lost_nats, _lost_points))
    return choices, "; ".join(texts), nats, points


def _change(way: Mapping[str, Any]) -> str:
    """Return the interval of the change of the mean over tasks, from those of the tasks, which are independent."""
    found = [own["by_byte_change"] for own in way["judgements"] if own["by_byte_change"] is not None]
    mean = sum(change["estimate"] for change in found) / len(found)
    low, high = (
        sum((change[end] - change["estimate"]) ** 2 for change in found) ** 0.5 / len(found) for end in ("low", "high")
    )
    return f" ({100 * (mean - low):+.1f} to {100 * (mean + high):+.1f})"


def _won_back(own: float | None, before: float | None) -> str:
    """Return which share of a loss is won back; nothing where there was no loss."""
    return "" if own is None or before is None or before <= 0 else f"{1 - own / before:.0%}"


def _lost_nats(way: Mapping[str, Any]) -> float | None:
    """Return the nats a token of texts that a way has lost to the stored model, the mean over texts."""
    lost = [
        own["nll"] - way["stored_nll"][own["task"]]
        for own in way.get("judgements", ())
        if own["accuracy"] is None and "stored_nll" in way
    ]
    return sum(lost) / len(lost) if lost else None


def _lost_points(way: Mapping[str, Any]) -> float | None:
    """Return the share of right choices that a way has lost to the stored model."""
    return None if way.get("mean_accuracy") is None else way["stored_accuracy"] - way["mean_accuracy"]


def _judged_on(ways: Mapping[str, Any]) -> str:
    """Return which rows the ways were judged on, and of what the shares are."""
    judged = next(way["judgements"] for way in ways.values() if "judgements" in way)
    rows = ", ".join(f"{own['task']} ({own['num_rows']})" for own in judged)
    return (
        f'Judged on rows of {rows}; "won back" is of what {BEFORE} loses to the stored model, and right choices are '
        "the mean over tasks by likelihood a byte, in brackets the 95 % interval of its change in points."
    )


def memory(folder: Path) -> str:
    """Return what clustering one matrix keeps for the way back, by mode, and how much less that is than autograd's, for
    each matrix that was measured.
    """
    return "\n\n".join(_memory_of(written) for _, written in read_named(folder, "*x*.json")) or NO_RUN


def _memory_of(written: Any) -> str:
    setting, costs = written["setting"], written["costs"]
    height, width = setting["shape"]
    plain = {cost["rows"]: cost for cost in costs if cost["mode"] == "plain"}
    rows = [
        (
            "one" if cost["rows"] is None else f"{cost['rows']} rows",
            cost["mode"],
            format_bytes(cost["kept_bytes"]),
            f"{plain[cost['rows']]['kept_bytes'] / cost['kept_bytes']:,.0f}x",
            format_bytes(cost["peak_bytes"]),
            f"{plain[cost['rows']]['peak_bytes'] / cost['peak_bytes']:.1f}x",
        )
        for cost in costs
    ]
    machine = captions.machine(written["provenance"], written["provenance"]["best_kernels"], setting["threads"])
    caption = f"A matrix of {height} x {width} in {setting['bits']} bits, {setting['rounds']} rounds. {machine}."
    heads = (
        "a palette for",
        "mode",
        "kept for the way back",
        "less than plain",
        "peak of the process",
        "less than plain",
    )
    return f"{caption}\n\n{table(heads, rows)}"


def steps(folder: Path) -> str:
    """Return peak and seconds of a training step with clustered matrices and without, for each file of
    ``benchmarks.palette_step``.
    """
    parts = []
    for _, written in read_named(folder, "step-*.json"):
        setting, found = written["setting"], written["steps"]
        machine = captions.machine(written["provenance"], written["provenance"]["best_kernels"], setting["threads"])
        is_timed = setting["steps"] > 0
        rows = [
            (
                kind,
                f"{format_bytes(cost['peak_bytes'])}, {cost['peak_bytes'] / found['plain']['peak_bytes']:.2f}x",
                f"{cost['seconds']:.1f} s, {cost['seconds'] / found['plain']['seconds']:.2f}x"
                f"{'' if is_timed else ' (one step, with all that a first one allocates)'}",
            )
            for kind, cost in found.items()
        ]
        caption = (
            f"A step of {setting['tokens']:,} tokens of the {setting['model']} Llama ({setting['layers']} layers), "
            f"{setting['bits']} bits. {machine}."
        )
        parts.append(f"{caption}\n\n{table(('matrices', 'peak of the process', 'time'), rows)}")
    return "\n\n".join(parts) or NO_RUN


def kernels(path: Path) -> str:
    """Return milliseconds of a pass by format and number of rows, and the factor from ``q4`` at as many rows."""
    if not path.is_file():
        return NO_RUN
    written = json.loads(path.read_text(encoding="utf-8"))
    machine = captions.machine(written["provenance"], written["kernels"], written["threads"])
    parts = [f"Passes of Llamas with drawn codes; milliseconds, and the factor from `q4`. {machine}."]
    for name, formats in written["models"].items():
        base = formats["q4"]["seconds"]
        rows = [
            (
                f"`{kind}`",
                f"{found['weight_bytes'] / 1e6:.0f} MB",
                *(f"{1e3 * took:.2f}, {took / base[count]:.2f}x" for count, took in found["seconds"].items()),
            )
            for kind, found in formats.items()
        ]
        parts.append(table((name, "bytes read", *(f"{count} rows" for count in base)), rows))
    return "\n\n".join(parts)
