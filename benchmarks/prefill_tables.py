"""Tables of what pruned prompts cost and save, from files that ``benchmarks/prefill_quality.py`` wrote."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import captions
from tools.blocks import table
from vivace.evaluate.bootstrap import paired_bootstrap, ratio_of_sums

LEAST = 0.15
"""Share of the questions that a full reading has to answer for a set to say anything about answers."""
HEADINGS = (
    "prefill",
    "layer passes",
    "first token",
    "NLL of the answer",
    "more than full (95 %)",
    "contains it",
    "points beside full (95 %)",
    "F1",
    "as full",
)

Answers = Mapping[str, Sequence[Mapping[str, Any]]]


def rows_of(answers: Answers, *, is_timed: bool) -> list[tuple[str, ...]]:
    """Return a row for each way of reading: its figures beside those of the full reading."""
    full, rows = answers["full"], []
    for name, own in answers.items():
        more = paired_bootstrap([one["nll"] for one in own], [one["nll"] for one in full])
        right, all_right = ([float(one["contains"]) for one in each] for each in (own, full))
        sooner = paired_bootstrap(
            [one["first_token_s"] for one in full], [one["first_token_s"] for one in own], statistic=ratio_of_sums
        )
        kept = ""
        if name != "full" and statistics.mean(all_right) >= LEAST:
            found = paired_bootstrap(right, all_right)
            kept = f"{100 * found.estimate:+.0f} ({100 * found.low:+.0f} to {100 * found.high:+.0f})"
        rows.append(
            (
                name,
                f"{statistics.mean(one['share'] for one in own):.0%}",
                f"{sooner.estimate:.2f}x" if is_timed else "",
                f"{statistics.mean(one['nll'] for one in own):.3f}",
                "" if name == "full" else f"{more.estimate:+.3f} ({more.low:+.3f} to {more.high:+.3f})",
                f"{statistics.mean(right):.0%}",
                kept,
                f"{statistics.mean(one['f1'] for one in own):.3f}",
                f"{statistics.mean(one['agrees'] for one in own):.0%}",
            )
        )
    return rows


def tables(folder: Path) -> str:
    """Return a table for each set of questions of each committed run."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        written = json.loads(path.read_text(encoding="utf-8"))
        setting, timed = written["setting"], written["setting"]["others_cpu_share"]
        is_timed = timed is not None and timed <= captions.BUSY
        head = f"{captions.heading(written['provenance'], setting['kernels'])}{captions.others(setting)}"
        for name, answers in written["answers"].items():
            full = answers["full"]
            if not full:
                continue
            tokens = statistics.mean(one["tokens"] for one in full)
            parts.append(
                f"{head}; {setting['model']}; {name}: {len(full)} questions of {tokens:,.0f} tokens on average."
            )
            parts.append(table(HEADINGS, rows_of(answers, is_timed=is_timed)))
    return "\n\n".join(parts) or "No run is committed yet."
