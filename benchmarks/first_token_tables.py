"""Table of the time to the first token, from files that ``vivace bench prefill --json`` wrote."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import captions
from tools.blocks import table

HEADINGS = ("prompt tokens", "prefill", "first token", "speed-up", "layer passes", "predicted")


def tables(folder: Path) -> str:
    """Return one table for each file."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        written = json.loads(path.read_text(encoding="utf-8"))
        setting = written["setting"]
        rows = [
            (
                f"{row['num_tokens']:,}",
                row["prefill"],
                f"{row['first_token_s'] * 1e3:,.0f} ms",
                f"{row['speedup']:.2f}x",
                f"{row['measured_share']:.1%}",
                f"{row['predicted_share']:.1%}",
            )
            for row in written["rows"]
        ]
        parts.append(
            f"{captions.heading(written['provenance'], setting['kernels'])}{captions.others(setting)}; "
            f"{setting['model']}, {setting['dtype']}, median of {setting['repeats']}, ways in turns."
        )
        parts.append(table(HEADINGS, rows))
    return "\n\n".join(parts) or "No run is committed yet."
