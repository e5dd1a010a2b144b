"""What ``benchmarks.rivals measure`` found, as one Markdown table for each model and kernels."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.blocks import table

NONE_YET = "No results are committed yet."
QUALITIES = {"exact_match": "exact match", "bleu": "BLEU"}
"""Metrics that stand in the table; the others are in the file."""


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """Every report in a folder, by name.

    Raises:
        ValueError: a file is not a report; names it.
    """
    reports = []
    for path in sorted(folder.glob("*.json")):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path.name} is not JSON: {error}") from error
        if not isinstance(report, dict) or not {"setting", "provenance", "runs"} <= set(report):
            raise ValueError(f"{path.name} is not a report of `python -m benchmarks.rivals measure`")
        reports.append(report)
    return reports


def titled_runs(reports: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Every run by model, prompts and kernels."""
    return [
        (", ".join(str(report["setting"][key]) for key in ("model", "prompts", "kernels")), run)
        for report in reports
        for run in report["runs"]
    ]


def tables(reports: Sequence[Mapping[str, Any]]) -> str:
    """All reports: those of one model and kernels side by side, a column for each prompt set."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for report in reports:
        groups.setdefault((report["setting"]["model"], report["setting"]["kernels"]), []).append(report)
    return "\n\n".join(_group(*key, own) for key, own in groups.items()) or NONE_YET


def _group(model: str, kernels: str, reports: Sequence[Mapping[str, Any]]) -> str:
    by_set = {str(report["setting"]["prompts"]): report for report in reports}
    found = [{row["method"]: row for row in report["runs"]} for report in reports]
    names = list(dict.fromkeys(name for rows in found for name in rows))
    s, p = reports[0]["setting"], reports[0]["provenance"]
    sets = ", ".join(f"{name}: {report['setting']['num_prompts']} prompts" for name, report in by_set.items())
    line = (
        f"**{model}**, kernels {kernels}, {p['cpu']}, {p['num_threads']} threads, batch 1, greedy; {sets}, at most "
        f"{s['max_new_tokens']} new tokens, {s['repeats']} repeats in turns; commit {p['commit'] or 'unknown'}."
    )
    rows = []
    for name in names:
        known = next(rows[name] for rows in found if name in rows)
        cells = [_cell(rows.get(name)) for rows in found]
        speeds = [rows[name]["speedup"] for rows in found if name in rows]
        mean = math.prod(speeds) ** (1 / len(speeds)) if len(speeds) == len(found) else None
        shown = "-" if mean is None else f"{mean:.2f}x"
        rows.append((name, _size(known), _training(known), known.get("plan") or "-", *cells, shown))
    header = ("method", "extra MB", "training", "draft", *by_set, "mean")
    return f"{line}\n\n{table(header, rows)}"


def _size(row: Mapping[str, Any]) -> str:
    return f"{row['extra_bytes'] / 1e6:.1f}" if row["extra_bytes"] else "0"


def _training(row: Mapping[str, Any]) -> str:
    facts = row.get("training")
    return "-" if facts is None else f"{facts['steps']} steps, {facts['minutes']:.0f} min"


def _cell(row: Mapping[str, Any] | None) -> str:
    """Speed beside the base's plain decoding with its interval, tokens a pass, layers a token, and how the text is."""
    if row is None:
        return "-"
    low, high = row["speedup_interval"]
    parts = [f"{row['speedup']:.2f}x ({low:.2f} to {high:.2f})"]
    if row["tokens_per_target_pass"]:
        parts.append(f"{row['tokens_per_target_pass']:.2f} a pass")
    if row["mean_exit_layer"] is not None:
        parts.append(f"{row['mean_exit_layer']:.1f} layers")
    scores = [
        f"{label} {values[name]:.3g}"
        for values in (row.get("quality") or {}).values()
        for name, label in QUALITIES.items()
        if name in values
    ]
    text = "same text" if row["identical"] else f"{row['num_different']} texts differ"
    return ", ".join([*parts, text, *scores])
