"""Tables of plain decoding by model family, from files that ``benchmarks.families`` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import captions
from benchmarks.decode_tables import interval
from benchmarks.result_files import tables_of
from tools.blocks import table

HEADINGS = ("model", "weights", "one call has", "tokens a second", "transformers", "gain (95 % interval)")


def tables(folder: Path) -> str:
    """Return one table for each file."""
    return tables_of(folder, _tables)


def _tables(written: Mapping[str, Any]) -> list[str]:
    models, origin, setting = written["models"], written["provenance"], written["setting"]
    dtype = setting.get("dtype", "bfloat16")
    busiest = max(models.values(), key=lambda found: found["others_cpu_share"] or 0)
    caption = (
        f"{captions.heading(origin, busiest['kernels'])}{captions.others(busiest)}; {dtype}, plain decoding of "
        f"one sequence, {setting['prompts']} prompts of random tokens, {setting['tokens']} tokens each, "
        f"{setting['repeats']} repeats in turns."
    )
    rows = []
    for name, found in models.items():
        ours, theirs, *inside = found["runs"]
        reach = "several tokens" if found["is_chain"] else "all layers" if found["is_span"] else "one layer"
        rows.append(
            (
                f"`{name}`",
                f"{found['parameters'] / 1e6:.1f} M",
                reach,
                f"{ours['tokens_per_s']:.0f}",
                f"{theirs['tokens_per_s']:.0f} ({found['transformers_dtype']})",
                interval(ours) if ours["speedup_interval"][0] > 0 else f"{ours['speedup']:.2f}x (of one answer)",
                *(f"{each['tokens_per_s']:.0f} ({each['tokens_per_s'] / ours['tokens_per_s']:.2f})" for each in inside),
            )
        )
    is_inside = len(rows[0]) > len(HEADINGS)
    return [caption, table((*HEADINGS, "inside transformers (share)") if is_inside else HEADINGS, rows)]
