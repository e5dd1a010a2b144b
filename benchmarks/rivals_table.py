"""Tables of the results of ``benchmarks.rivals measure``, one for each model, processor and kernels."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import captions
from benchmarks.decode_tables import interval
from benchmarks.trainings import training
from tools.blocks import table

NONE_YET = "No results are committed yet."
QUALITIES = {"exact_match": "exact match", "bleu": "BLEU"}
"""Metrics in the table; the others are in the file."""
PYTHON = ("medusa", "eagle", "uno", "draft", "lookahead")
"""Methods that return to Python in every step."""
INSERTION, LAYERS = 12, 24
"""Insertion layer of the streams, and number of layers of the models, in these files.

The files name only the plan; the size of the streams' weights is that of streams from layer 12, and every model in
them has 24 layers.
"""
STREAMS_BYTES = (3656696, 24035168)
"""Bytes of such streams for the model and for its copy of four times the width."""
ROUTERS = {"arla": "the paper's latent attention (ARLA)", "mlp": "one hidden layer (MLP), not the paper's ARLA"}
"""Descriptions of the kinds of routers of ``dynamic``."""
FORMER_ROUTERS = {"vivace-14m": "mlp", "vivace-14m-x4": "mlp"}
"""Router of the adapters that ship, for files that do not record it."""


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """Read every report in a folder, in the order of names.

    Raises:
        ValueError: a file is not a report; the message names it.
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


def stream_layers(row: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the layers that a step of ``multistream`` runs, to verify and for the streams; None for other methods.

    Raises:
        ValueError: the file does not tell where the streams are inserted.
    """
    if row["method"] != "multistream":
        return None
    if row.get("layers_per_step"):
        return row["layers_per_step"]["verify"], row["layers_per_step"]["draft"]
    if "kept" not in row["plan"]:
        return LAYERS, 0
    if row["extra_bytes"] not in STREAMS_BYTES:
        raise ValueError(f"it is not known where streams of {row['extra_bytes']} bytes are inserted")
    return LAYERS, LAYERS - INSERTION


def tables(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return all reports: those of one model, processor and kernels side by side, with a column for each prompt set."""
    groups = captions.by_kind(
        reports, lambda report: (report["setting"]["model"], report["provenance"]["cpu"], report["setting"]["kernels"])
    )
    return "\n\n".join(_group(own) for own in groups.values()) or NONE_YET


def _group(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return caption and table of the reports of one model, processor and kernels.

    Raises:
        ValueError: two reports are of the same prompts, or have other limits.
    """
    by_set = {str(report["setting"]["prompts"]): report for report in reports}
    limits = {tuple(report["setting"][name] for name in ("max_new_tokens", "repeats")) for report in reports}
    if len(by_set) < len(reports) or len(limits) > 1:
        which = ", ".join(str(report["setting"]["prompts"]) for report in reports)
        raise ValueError(f"one table of {reports[0]['setting']['model']} over prompts twice or other limits: {which}")
    found = [{row["method"]: row for row in report["runs"]} for report in reports]
    names = list(dict.fromkeys(name for rows in found for name in rows))
    s = reports[0]["setting"]
    sets = ", ".join(f"{name}: {report['setting']['num_prompts']} prompts" for name, report in by_set.items())
    machines = dict.fromkeys(captions.machine(report["provenance"], s["kernels"]) for report in reports)
    line = (
        f"**{s['model']}**, {'; '.join(machines)}; batch 1, greedy; {sets}, at most "
        f"{s['max_new_tokens']} new tokens, {s['repeats']} repeats in turns. {_notes(s['model'], found)}"
    )
    rows = []
    for name in names:
        known = next(rows[name] for rows in found if name in rows)
        cells = [_cell(rows.get(name), rows["plain"]) for rows in found]
        means = [_mean(found, name, whole=whole) for whole in (False, True)]
        learnt = training(s["model"], name, known.get("training"))
        rows.append((name, _size(known), learnt, known.get("plan") or "-", *cells, ", ".join(means)))
    header = ("method", "extra MB", "training", "draft", *by_set, "mean, of whole answers")
    return f"{line}\n\n{table(header, rows)}"


def _notes(model: str, found: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
    """Return notes that some rows need."""
    names = {name for rows in found for name in rows}
    notes = ["Speeds are those of decoding, then of whole answers with their prompts; both beside plain decoding."]
    python = [f"`{name}`" for name in PYTHON if name in names]
    if python:
        notes.append(
            f"{', '.join(python)} go through Python in every step, and the widths of their drafts were searched on "
            "such "
            "steps; the others were timed, and searched, in native calls of several steps."
        )
    row = next((rows["multistream"] for rows in found if "multistream" in rows), None)
    layers = stream_layers(row) if row is not None else None
    if layers is not None and layers[1]:
        notes.append(
            f"`multistream` runs `attach: kept`: a step has {layers[0]} layer passes to verify and {layers[1]} more "
            "for its "
            f"streams, which tokens a pass leave out; beside them stand tokens for every {layers[0]} layer passes."
        )
    if "dynamic" in names:
        row = next(rows["dynamic"] for rows in found if "dynamic" in rows)
        kind = row.get("router") or FORMER_ROUTERS.get(model)
        notes.append(f"The router of `dynamic` is {ROUTERS.get(kind, captions.NOT_RECORDED)}.")
    if model.endswith("-x4") and "draft" in names:
        notes.append("The draft model was widened with its target, to 22.6 MB; the README has the one of 1.9 MB.")
    return " ".join(notes)


def _mean(found: Sequence[Mapping[str, Mapping[str, Any]]], name: str, *, whole: bool) -> str:
    """Return the geometric mean over prompt sets for a method that was measured on all of them."""
    if any(name not in rows for rows in found):
        return "-"
    gains = [captions.whole_answers(rows[name], rows["plain"]) if whole else rows[name]["speedup"] for rows in found]
    return f"{math.prod(gains) ** (1 / len(gains)):.2f}x"


def _size(row: Mapping[str, Any]) -> str:
    """Return the size of a method's weights in MB."""
    return f"{row['extra_bytes'] / 1e6:.1f}" if row["extra_bytes"] else "0"


def _cell(row: Mapping[str, Any] | None, plain: Mapping[str, Any]) -> str:
    """Return speed-ups over the base's plain decoding, tokens per pass, layers per token, and identity and quality of
    text.
    """
    if row is None:
        return "-"
    parts = [interval(row), f"{captions.whole_answers(row, plain):.2f}x whole"]
    if row["tokens_per_target_pass"]:
        parts.append(f"{row['tokens_per_target_pass']:.2f} a pass")
    layers = stream_layers(row)
    if layers is not None and layers[1]:
        parts.append(f"{row['tokens_per_target_pass'] * layers[0] / sum(layers):.2f} for {layers[0]} layers")
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
