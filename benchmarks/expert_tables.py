"""Experts from disk as Markdown: the files of ``results/experts``, which ``benchmarks.experts`` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COLUMNS = (
    *("policy", "ms a token", "beside LRU", "of the oracle", "beside no cache", "bound beside LRU"),
    *("loads a token", "wasted", "device bytes beside loads"),
)
HEADER = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"


def tables(folder: Path) -> str:
    """One table a file and share."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        p, settings = report["provenance"], report["settings"]
        parts.append(
            f"**{path.stem}**: {report['num_experts']} experts of {report['expert_bytes'] / 1e6:.2f} MB, "
            f"{_device(report)}, "
            f"{2 * settings['prompts'] - 1} answers of {settings['tokens']} tokens at most; "
            f"{'; '.join(f'{name}: {_seen(found)}' for name, found in report['foresight'].items())}; {p['cpu']}, "
            f"{settings['threads']} thread(s), commit {p['commit'] or 'unknown'}."
        )
        parts += [_of_share(run) for run in report["runs"]]
    return "\n\n".join(parts) or "No run is committed yet."


def _device(report: dict[str, Any]) -> str:
    if report["is_paced"]:
        return "a device that is not here and takes no processor's time"
    return f"{report['settings']['reader']} reads from a disk of {report['device_gb_per_s']:.2f} GB/s"


def _seen(found: dict[str, Any]) -> str:
    """What an adapter sees with."""
    rate, taught, leads = found["config"]["rate"], found["config"]["leads"], found["plan"]["leads"]
    parts = [f"the accelerated residual at rate {rate:g}"] if rate else []
    parts += ["a forecast"] if found["config"]["forecast"] else []
    for kind, asked in (
        ("taught routers", [lead for lead in leads if lead in taught]),
        ("routers as they are", [lead for lead in leads if lead not in taught]),
    ):
        parts += [f"{kind} {' and '.join(map(str, asked))} layer(s) early"] if asked else []
    return ", ".join(parts)


def _of_share(run: dict[str, Any]) -> str:
    lru = next(row for row in run["policies"] if row["policy"] == "lru")
    load, compute = lru["load_ms_per_token"], lru["compute_ms_per_token"]
    paced = "" if run["pace_gb_per_s"] is None else f" at a stated {run['gb_per_s']:.2f} GB/s"
    head = (
        f"{run['share']:.0%} of the experts in memory, reads{paced or ' as fast as they are'}; "
        f"LRU loads for {load:.1f} ms a token and computes for {compute:.1f}."
    )
    return "\n".join([head, "", HEADER, *(_row(row, is_read=not paced) for row in run["policies"])])


def _row(row: dict[str, Any], *, is_read: bool) -> str:
    low, high = row["over_lru_range"]
    told = row["device_bytes"] / row["loaded_bytes"] if row["loaded_bytes"] else 1.0
    cells = (
        row["policy"].replace("_", " "),
        f"{row['ms_per_token']:.1f}",
        f"{row['over_lru']:.2f}x ({low:.2f} to {high:.2f})",
        f"{row['over_oracle']:.2f}",
        f"{row['over_on_demand']:.2f}x",
        f"{row['bound_over_lru']:.2f}x",
        f"{row['loads_per_token']:.1f}",
        f"{row['wasted'] / max(1, row['loads']):.0%}",
        f"{told:.3f}" if is_read else "-",
    )
    return f"| {' | '.join(cells)} |"


def sweep(path: Path) -> str:
    """What ``benchmarks.expert_sweep`` found: a row for each cache, a column for each bandwidth."""
    if not path.is_file():
        return "No sweep is committed yet."
    report = json.loads(path.read_text(encoding="utf-8"))
    rows = report["rows"]
    speeds = sorted({row["gb_per_s"] for row in rows})
    lines = [f"| experts in memory | {' | '.join(f'{speed:g} GB/s' for speed in speeds)} |"]
    lines.append(f"|{' --- |' * (len(speeds) + 1)}")
    for share in sorted({row["share"] for row in rows}):
        of = {row["gb_per_s"]: row for row in rows if row["share"] == share}
        cells = (f"{of[s]['over_on_demand']:.1f}x, {of[s]['over_lru']:.2f}x, {of[s]['of_oracle']:.2f}" for s in speeds)
        lines.append(f"| {share:.0%} | {' | '.join(cells)} |")
    return "\n".join([*lines, *_rates(report.get("rates", []), speeds)])


def _rates(rows: list[dict[str, Any]], speeds: list[float]) -> list[str]:
    """Beside no cache and beside LRU for each rate and number of expected experts."""
    if not rows:
        return []
    lines = ["", f"| R, k', half in memory | {' | '.join(f'{speed:g} GB/s' for speed in speeds)} |"]
    lines.append(f"|{' --- |' * (len(speeds) + 1)}")
    for name in dict.fromkeys((row["rate"], row["count"]) for row in rows):
        of = {row["gb_per_s"]: row for row in rows if (row["rate"], row["count"]) == name}
        cells = (f"{of[s]['over_on_demand']:.2f}x, {of[s]['over_lru']:.2f}x" for s in speeds)
        lines.append(f"| {name[0]}, {name[1]} | {' | '.join(cells)} |")
    return lines
