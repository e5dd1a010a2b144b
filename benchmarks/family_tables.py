"""Tables of plain decoding by model family, from files that ``benchmarks.families`` wrote."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import captions
from benchmarks.decode_tables import interval
from tools.blocks import table

HEADINGS = ("model", "weights", "one call has", "tokens a second", "transformers", "gain (95 % interval)")


def tables(folder: Path) -> str:
    """Return one table for each file."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        written = json.loads(path.read_text(encoding="utf-8"))
        models, origin, setting = written["models"], written["provenance"], written["setting"]
        dtype = setting.get("dtype", "bfloat16")
        busiest = max(models.values(), key=lambda found: found["others_cpu_share"] or 0)
        parts.append(
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
                    interval(ours),
                    *(
                        f"{each['tokens_per_s']:.0f} ({each['tokens_per_s'] / ours['tokens_per_s']:.2f})"
                        for each in inside
                    ),
                )
            )
        is_inside = len(rows[0]) > len(HEADINGS)
        parts.append(table((*HEADINGS, "inside transformers (share)") if is_inside else HEADINGS, rows))
    return "\n\n".join(parts) or "No run is committed yet."
