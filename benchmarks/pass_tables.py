"""Tables of the cost of passes and of other engines, from the files of ``results/passes``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import captions
from tools.blocks import table

MORE_ROWS = ("2", "4", "8", "16")
"""Numbers of rows that are compared with a pass over one row."""


def tables(folder: Path) -> str:
    """Return the tables of all files in a folder: those of ``benchmarks.kernels``, then those of
    ``benchmarks.peers``.
    """
    parts = []
    for kind, make in (("kernels", costs), ("peers", engines)):
        for path in sorted(folder.glob(f"{kind}*.json")):
            parts.append(make(json.loads(path.read_text(encoding="utf-8"))))
    return "\n\n".join(parts) or "No passes are committed yet."


def costs(report: Mapping[str, Any]) -> str:
    """Return the table of a file of ``benchmarks.kernels``: one row beside memory bandwidth, more rows beside one."""
    reads = report["read_bytes_per_s"]
    best = max(reads.values())
    rows = [
        (
            _weights(name),
            f"{found['weight_bytes'] / 1e6:.1f} MB",
            f"{found['seconds']['1'] * 1e3:.2f} ms",
            f"{found['weight_bytes'] / found['seconds']['1'] / best:.0%}",
            *_token(found, best),
            *(f"{found['seconds'][k] / found['seconds']['1']:.2f}" for k in MORE_ROWS),
        )
        for name, found in report["models"].items()
    ]
    header = (
        "model",
        "weights a pass",
        "one row",
        "of the best stream",
        "a token",
        "of reading",
        *(f"{k} rows" for k in MORE_ROWS),
    )
    title = f"### Passes: {_machine(report)}, {captions.kernels(report['provenance'], report['kernels'])}"
    measure = ", ".join(f"{name} {value / 1e9:.1f} GB/s" for name, value in reads.items())
    about = f"Medians; reading memory in turns with them: {measure}. Passes over more rows are in passes over one. "
    about += (
        "A token is one of plain decoding's, everything included, beside reading the weights as fast as memory gives."
    )
    return "\n\n".join((title, about, table(header, rows)))


def engines(report: Mapping[str, Any]) -> str:
    """Return the tables of a file of ``benchmarks.peers``: plain decoding, and passes over one and eight rows."""
    parts = [f"### Other engines: {_machine(report)}"]
    for model, found in report["models"].items():
        passes = found["passes"]
        other = next(run for run in found["runs"] if run["method"] == "transformers")
        rows = [
            (
                run["method"],
                f"{run['tokens_per_s']:.1f}",
                "{:.1f} to {:.1f}".format(*run["tokens_per_s_spread"]),
                f"{run['tokens_per_s'] / other['tokens_per_s']:.2f}x",
                f"{captions.whole_answers(run, other):.2f}x",
                *(_pass(passes.get(run["method"]), rows) for rows in ("1", "8")),
            )
            for run in found["runs"]
        ]
        heat = found["heat"]
        dtype = f"; transformers runs in {heat['dtype']}, its faster type here" if heat else ""
        weights = f"{found['weight_bytes'] / 1e6:.0f} MB of bfloat16 weights a pass"
        speeds = ("tokens/s", "lowest to highest", "beside transformers", "whole answers")
        header = ("engine", *speeds, "one row", "eight rows")
        kernels = captions.kernels(report["provenance"], found["kernels"])
        parts += [f"**{model}**: {weights}, {kernels}{dtype}.", table(header, rows)]
    return "\n\n".join(parts)


def _token(found: Mapping[str, Any], best: float) -> tuple[str, str]:
    """Return the time of a token of plain decoding, and how often the weights could be read in that time."""
    if "token_seconds" not in found:  # files of earlier versions lack it
        return "-", "-"
    return f"{found['token_seconds'] * 1e3:.2f} ms", f"{found['token_seconds'] * best / found['weight_bytes']:.2f}x"


def _pass(found: Mapping[str, float] | None, rows: str) -> str:
    return "-" if found is None else f"{found[rows] * 1e3:.2f} ms"


def _weights(name: str) -> str:
    """Return model and format; a model without a format is in bfloat16."""
    return name if " " in name else f"{name} bf16"


def _machine(report: Mapping[str, Any]) -> str:
    p = report["provenance"]
    return f"{p['cpu']}, {p['num_threads']} threads, {captions.tree(p)}"
