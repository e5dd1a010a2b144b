"""Tables of a run of ``benchmarks.hostile``, for ``docs/serving.md``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks import captions
from tools.blocks import table

MOST_OUTCOMES = 6
"""Number of outcomes shown for each kind, the most frequent ones; the file has all."""


def tables(path: Path) -> str:
    """Return every kind of client with the outcomes of its requests, and every bar, from the file of a run."""
    if not path.is_file():
        return "No result is committed yet."
    report = json.loads(path.read_text(encoding="utf-8"))
    setting, origin = report["setting"], report["provenance"]
    caption = (
        f"**{setting['clients']} clients for {setting['seconds']:.0f} seconds**, {setting['model']}, method `auto`; "
        f"{origin['cpu']}, {origin['num_cores']} cores, {captions.tree(origin)}{captions.others(setting)}. "
        f"{report['num_equal']:,} answers were compared with the engine's, {report['server']['tokens']:,.0f} tokens "
        "written."
    )
    kinds = [(kind, f"{found['sent']:,}", _outcomes(found["outcomes"])) for kind, found in report["kinds"].items()]
    bars = [(bar["name"], bar["found"], "met" if bar["is_met"] else "**missed**") for bar in report["bars"]]
    lag, health = report["loop_lag"], report["health_lag"]
    late = [
        ("event loop, inside", *(f"at most {1e3 * lag[name]:g} ms" for name in ("p50_s", "p99_s")), _ms(lag["max_s"])),
        ("`/health`, outside", *(_ms(health[name]) for name in ("p50_s", "p99_s", "max_s"))),
    ]
    return "\n\n".join(
        (
            caption,
            table(("kind", "requests", "how they ended"), kinds),
            table(("late by", "median", "99th percentile", "most"), late),
            table(("bar", "found", ""), bars),
        )
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _outcomes(outcomes: Mapping[str, int]) -> str:
    shown = sorted(outcomes.items(), key=lambda pair: -pair[1])
    parts = [f"{name}: {count:,}" for name, count in shown[:MOST_OUTCOMES]]
    rest = sum(count for _, count in shown[MOST_OUTCOMES:])
    return "; ".join([*parts, *([f"others: {rest:,}"] if rest else [])])
