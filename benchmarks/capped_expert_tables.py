"""The table of a run of ``benchmarks.capped_experts``, written from its result file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import captions
from benchmarks.result_files import NO_RUN, read_named
from tools.blocks import table
from vivace.units import format_bytes

RIVALS = ("mmap", "llama.cpp", "accelerate")
OTHERS = {
    "mmap": "our memory map",
    "llama.cpp": "llama.cpp's memory map",
    "accelerate": "transformers with accelerate",
}


COLUMNS = (
    *("row", "ms a token", "beside LRU", "bound beside LRU", "beside no cache", "simulator", "loads a token"),
    *("read a token, prompts included", "most memory", "texts as on demand"),
)


def gains_over(base: dict[str, Any], row: dict[str, Any]) -> tuple[float, list[float]]:
    """Return how many times as fast as another a row is on the answers that both have, and the gain of each answer.

    Answers count as the tokens that both wrote of them. The answers of a row may be shorter than the other's, whose
    time per token is that of its whole answer then.
    """
    slow, fast = base["ms_by_answer"], row["ms_by_answer"]
    counts = [min(map(len, pair)) - 1 for pair in zip(base["texts"][1:], row["texts"][1:], strict=False)]
    shared = list(zip(counts, slow, fast, strict=False))
    gain = sum(n * ms for n, ms, _ in shared) / sum(n * ms for n, _, ms in shared)
    return gain, [a / b for _, a, b in shared]


def tables_of(folder: Path) -> str:
    """Return the tables of all committed runs, those of the slowest device first."""
    reports = sorted((report for _, report in read_named(folder)), key=lambda report: float(report["gb_per_s"]))
    return "\n\n".join(map(tables, reports)) or NO_RUN


def tables(report: dict[str, Any]) -> str:
    """Return a run as a table, with what was asked for."""
    rows = report["rows"]
    told = [_told(OTHERS.get(name, name.replace("_", " ")), row, rows) for name, row in rows.items()]
    caption = (
        f"{captions.heading(report['provenance'], report['kernels'])}; {report['num_experts']} experts of "
        f"{report['expert_bytes'] / 1e6:.2f} MB, {report['share']:.0%} of them in memory, bfloat16. Every row is a "
        f"process in a control group of {format_bytes(report['limit_bytes'])}, page cache included (the store is "
        f"{format_bytes(report['store_bytes'])}), whose reads of the disk the kernel holds to "
        f"{report['gb_per_s']:g} GB/s. {report['answers']} answers of at most {report['tokens']} tokens after one that "
        "fills the caches; prompts are left out of the times."
    )
    return "\n\n".join((caption, table(COLUMNS, told), *_verdict(report)))


def _told(name: str, row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    if "error" in row:
        return name, row["error"], *[""] * (len(COLUMNS) - 2)
    low, high = row.get("over_lru_range", (1.0, 1.0))
    simulated = row.get("simulated_ms")
    base = rows.get("on_demand", {}).get("texts", [])
    same = sum(a[: len(b)] == b for a, b in zip(base, row["texts"], strict=False))
    return (
        f"{name}, cut after {row['cut_s']:g} s: {row['num_tokens']} tokens" if "cut_s" in row else name,
        f"{row['ms_per_token']:.1f}",
        f"{row.get('over_lru', 0):.2f}x ({low:.2f} to {high:.2f})",
        f"{row['bound_over_lru']:.2f}x" if "bound_over_lru" in row else "",
        f"{row['over_on_demand']:.2f}x" if "over_on_demand" in row else "",
        "" if simulated is None else f"{simulated:.1f} ({simulated / row['ms_per_token'] - 1:+.0%})",
        f"{row['loads_per_token']:.1f}" if row.get("loads_per_token") else "",
        format_bytes(int(row["device_bytes"] / row["num_tokens"])),
        format_bytes(row["peak_bytes"]),
        f"{same} of {min(len(base), len(row['texts']))}" if base else "",
    )


def _verdict(report: dict[str, Any]) -> Iterator[str]:
    """Yield what the run says of the bars: gains, bounds and the simulator's error."""
    rows = {name: row for name, row in report["rows"].items() if "error" not in row}
    if "ahead" not in rows or "lru" not in rows:
        return
    ahead = rows["ahead"]
    behind = [
        f"{1 / gains_over(rows[name], ahead)[0]:.2f} of the time of {OTHERS[name]}" for name in RIVALS if name in rows
    ]
    above = [n.replace("_", " ") for n, row in rows.items() if row["over_lru"] > row.get("bound_over_lru", 9e9) + 0.005]
    gains = [
        f"{ahead[f'over_{base}']:.2f}x {name} ({bar} was asked for)"
        for base, name, bar in (("lru", "LRU", "1.25x"), ("on_demand", "no cache", "2.5x"))
        if f"over_{base}" in ahead
    ]
    rivals = f"It takes {', '.join(behind)}. " if behind else ""
    off = [row["simulated_ms"] / row["ms_per_token"] - 1 for row in rows.values() if "simulated_ms" in row]
    simulator = f"is {min(off):+.0%} to {max(off):+.0%} off (15% was asked for)" if off else "was not run"
    yield (
        f"Ahead of time: {' and '.join(gains)}. {rivals}"
        f"Gains above their own bound: {', '.join(n for n in above if n != 'lru') or 'none'}. The simulator "
        f"{simulator}."
    )
