"""Table of the time to the first token, from files that ``vivace bench prefill --json`` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import captions
from benchmarks.result_files import tables_of
from tools.blocks import table

HEADINGS = ("prompt tokens", "prefill", "first token", "speed-up", "layer passes", "predicted")


def tables(folder: Path) -> str:
    """Return one table for each file."""
    return tables_of(folder, _tables)


def _tables(written: Mapping[str, Any]) -> list[str]:
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
    caption = (
        f"{captions.heading(written['provenance'], setting['kernels'])}{captions.others(setting)}; "
        f"{setting['model']}, {setting['dtype']}, median of {setting['repeats']}, ways in turns."
    )
    return [caption, table(HEADINGS, rows)]
