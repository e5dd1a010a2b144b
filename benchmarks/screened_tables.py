"""Tables of greedy decoding with a screened head, from files that ``benchmarks.screened run`` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import captions
from benchmarks.result_files import tables_of
from tools.blocks import table

HEADINGS = (
    "model",
    "other weights",
    "tokens a second",
    "with a screen",
    "gain, median (10 to 90 %)",
    "outputs computed",
    "memory",
)


def tables(folder: Path) -> str:
    """Return one table for each file."""
    return tables_of(folder, _tables)


def _tables(written: Mapping[str, Any]) -> list[str]:
    reports, origin = written["reports"], written["provenance"]
    first = reports[0]["setting"]
    different = sum(report["num_different"] for report in reports)
    answers = sum(report["setting"]["num_prompts"] * report["setting"]["repeats"] for report in reports)
    busiest = max((report["setting"] for report in reports), key=lambda setting: setting["others_cpu_share"] or 0)
    caption = (
        f"{captions.heading(origin, first['kernels'])}{captions.others(busiest)}; plain decoding, "
        f"{first['num_prompts']} packaged prompts, {first['new_tokens']} tokens each, {first['repeats']} "
        "repeats in turns. "
        f"{different} of {answers} answers differ between the two heads."
    )
    rows = [
        (
            f"{report['setting']['model']}, {report['setting']['vocab_size']:,} tokens",
            row["weights"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['tokens_per_s_screened']:.1f}",
            f"{row['ratio']:.2f}x ({row['ratio_spread'][0]:.2f} to {row['ratio_spread'][1]:.2f})",
            f"{row['share_computed']:.2%}",
            f"{row['bytes'] / 1e6:.0f} -> {row['bytes_screened'] / 1e6:.0f} MB",
        )
        for report in reports
        for row in report["rows"]
    ]
    return [caption, table(HEADINGS, rows)]
