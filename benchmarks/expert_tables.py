"""Tables of experts read from disk, from the files of ``results/experts`` that ``benchmarks.experts`` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import captions
from benchmarks.result_files import NO_RUN, read_named
from tools.blocks import table

COLUMNS = (
    *("policy", "ms a token", "simulator", "simulator beside it", "beside LRU", "of the oracle", "beside no cache"),
    *("bound beside LRU", "loads a token", "wasted", "loaded at", "device bytes beside loads"),
)


def headline(path: Path) -> str:
    """Return a sentence on the gain from prefetching when loading takes as long as computing, and the residual's part
    in it.
    """
    if not path.is_file():
        return NO_RUN
    report = json.loads(path.read_text(encoding="utf-8"))
    runs = [{row["policy"]: row for row in run["policies"]} for run in report["runs"]]
    shares = " and ".join(f"{run['share']:.0%}" for run in report["runs"])
    machine = captions.machine(report["provenance"], None, report["settings"]["threads"])

    def gains(policy: str, key: str = "over_lru") -> str:
        return " and ".join(f"{rows[policy][key]:.2f}x" for rows in runs)

    return (
        f"On a stand-in device whose loads only take time (`benchmarks/paced_device.py`), with {shares} of the "
        "experts in "
        f"memory, `ahead` is {gains('ahead')} as fast as LRU; it has no accelerated residual in it (`rate: null`), "
        "and the "
        f"accelerated residual itself gives {gains('accelerated')}. Beside no cache these are "
        f"{gains('ahead', 'over_on_demand')} and {gains('accelerated', 'over_on_demand')}, beside the oracle "
        f"{_of_oracle(runs, 'ahead')} and {_of_oracle(runs, 'accelerated')}; 1.25 beside LRU, 2.5 beside no cache "
        "and .85 of "
        f"the oracle were asked for. Measured on {machine}."
    )


def _of_oracle(runs: list[dict[str, dict[str, Any]]], policy: str) -> str:
    """Return a policy's speed relative to the oracle's, for each run."""
    return " and ".join(f"{rows[policy]['over_oracle']:.2f}" for rows in runs)


def tables(folder: Path) -> str:
    """Return one table for each file and share."""
    parts = []
    for stem, report in read_named(folder):
        settings, p = report["settings"], report["provenance"]
        machine = f"{p['cpu']}, {settings['threads']} thread(s), {captions.tree(p)}"
        parts.append(
            f"**{stem}**: {report['num_experts']} experts of {report['expert_bytes'] / 1e6:.2f} MB, "
            f"{_device(report)}, "
            f"{2 * settings['prompts'] - 1} answers of {settings['tokens']} tokens at most; "
            f"{'; '.join(f'{name}: {_seen(found)}' for name, found in report['foresight'].items())}; {machine}. "
            "Times are "
            f"those of decoded tokens, prompts left out.{_warning(report)}"
        )
        parts += [_of_share(run, report) for run in report["runs"]]
    return "\n\n".join(parts) or NO_RUN


def _device(report: dict[str, Any]) -> str:
    """Describe the device that the experts were read from."""
    if report["is_paced"]:
        return "**a stand-in device**: experts lie in memory, a load only waits and takes no processor's time"
    return (
        f"{report['settings']['reader']} reads of a file on a disk **whose own caches, or whose host's, serve them as "
        f"they may**: a probe before the run read {report['device_gb_per_s']:.2f} GB/s"
    )


def _warning(report: dict[str, Any]) -> str:
    """Return what the rows of a run on a real device cannot be used for, counted from the rows themselves."""
    if report["is_paced"]:
        return ""
    rows = [(run, row) for run in report["runs"] for row in run["policies"]]
    on_demand = [row["ms_per_token"] for _, row in rows if row["policy"] == "on_demand"]
    beyond = [
        f"{row['policy'].replace('_', ' ')} at {run['share']:.0%}"
        for run, row in rows
        if row["over_lru"] > row["bound_over_lru"] and row["policy"] not in ("lru", "on_demand")
    ]
    if not beyond:
        return ""
    return (
        f" Few answers, and reads faster than the probe: on demand, which keeps nothing, takes "
        f"{' and '.join(f'{each:.1f}' for each in on_demand)} ms depending on a cache that it does not have, and "
        f"{len(beyond)} gains are above their own bound ({', '.join(beyond)})."
    )


def _seen(found: dict[str, Any]) -> str:
    """Describe what an adapter predicts experts from."""
    rate, taught, leads = found["config"]["rate"], found["config"]["leads"], found["plan"]["leads"]
    parts = [f"the accelerated residual at rate {rate:g}"] if rate else ["no accelerated residual (`rate: null`)"]
    parts += ["a forecast"] if found["config"]["forecast"] else []
    for kind, asked in (
        ("taught routers", [lead for lead in leads if lead in taught]),
        ("routers as they are", [lead for lead in leads if lead not in taught]),
    ):
        parts += [f"{kind} {' and '.join(map(str, asked))} layer(s) early"] if asked else []
    return ", ".join(parts)


def _of_share(run: dict[str, Any], report: dict[str, Any]) -> str:
    """Return caption and table for one share of experts in memory."""
    lru = next(row for row in run["policies"] if row["policy"] == "lru")
    load, compute = lru["load_ms_per_token"], lru["compute_ms_per_token"]
    off = [row["simulated_ms_per_token"] / row["ms_per_token"] - 1 for row in run["policies"]]
    if report["is_paced"]:
        where = f"stand-in device, loads at a stated {run['gb_per_s']:.2f} GB/s"
    else:
        where = "reads as fast as the disk and caches behind it give them"
    head = (
        f"{run['share']:.0%} of the experts in memory, {where}; LRU loads for {load:.1f} ms a token and computes for "
        f"{compute:.1f}. The simulator is {min(off):+.0%} to {max(off):+.0%} off these rows."
    )
    rows = [_row(row, report) for row in run["policies"]]
    return f"{head}\n\n{table(COLUMNS, rows)}"


def _row(row: dict[str, Any], report: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["over_lru_range"]
    simulated = row["simulated_ms_per_token"]
    told = row["device_bytes"] / row["loaded_bytes"] if row["loaded_bytes"] else 1.0
    read = row["loads_per_token"] * report["expert_bytes"] / row["ms_per_token"] / 1e6
    return (
        row["policy"].replace("_", " "),
        f"{row['ms_per_token']:.1f}",
        f"{simulated:.1f}",
        f"{simulated / row['ms_per_token'] - 1:+.0%}",
        f"{row['over_lru']:.2f}x ({low:.2f} to {high:.2f})",
        f"{row['over_oracle']:.2f}",
        f"{row['over_on_demand']:.2f}x",
        f"{row['bound_over_lru']:.2f}x",
        f"{row['loads_per_token']:.1f}",
        f"{row['wasted'] / max(1, row['loads']):.0%}",
        *(("-", "-") if report["is_paced"] else (f"{read:.2f} GB/s", f"{told:.3f}")),
    )


def sweep(path: Path, runs: Path) -> str:
    """Return the table of ``benchmarks.expert_sweep``: a row for each cache size, a column for each bandwidth.

    Args:
        path: its file.
        runs: folder of measured runs, from which the simulator's error follows.
    """
    if not path.is_file():
        return "No sweep is committed yet."
    report = json.loads(path.read_text(encoding="utf-8"))
    rows = report["rows"]
    speeds = sorted({row["gb_per_s"] for row in rows})
    cells = []
    for share in sorted({row["share"] for row in rows}):
        of = {row["gb_per_s"]: row for row in rows if row["share"] == share}
        shown = (f"{of[s]['over_on_demand']:.1f}x, {of[s]['over_lru']:.2f}x, {of[s]['of_oracle']:.2f}" for s in speeds)
        cells.append((f"{share:.0%}", *shown))
    found = [
        f"**Simulated**, nothing here was measured; the file names no machine and no commit. {_errors(runs)}",
        table(("experts in memory", *_speeds(speeds)), cells),
        *_rates(report.get("rates", []), speeds),
    ]
    return "\n\n".join(found)


def _errors(folder: Path) -> str:
    """Return the simulator's error for each measured run."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        off = [
            row["simulated_ms_per_token"] / row["ms_per_token"] - 1 for run in report["runs"] for row in run["policies"]
        ]
        what = "the stand-in device" if report["is_paced"] else "reads of a disk whose caches may serve them"
        parts.append(f"{min(off):+.0%} to {max(off):+.0%} on {what}")
    return f"Milliseconds that the simulator says are off the measured ones by {', by '.join(parts)}."


def _speeds(speeds: list[float]) -> tuple[str, ...]:
    return tuple(f"{speed:g} GB/s" for speed in speeds)


def _rates(rows: list[dict[str, Any]], speeds: list[float]) -> list[str]:
    """Return tables of speed-ups over no cache and over LRU for each rate and number of predicted experts, one for
    each share of the experts in memory; sweeps of before say none and had half.
    """
    found = []
    for share in sorted({row.get("share", 0.5) for row in rows}):
        here = [row for row in rows if row.get("share", 0.5) == share]
        cells = []
        for rate, count in dict.fromkeys((row["rate"], row["count"]) for row in here):
            of = {row["gb_per_s"]: row for row in here if (row["rate"], row["count"]) == (rate, count)}
            shown = (f"{of[s]['over_on_demand']:.2f}x, {of[s]['over_lru']:.2f}x" for s in speeds)
            cells.append((f"{rate}, {count}", *shown))
        kept = "half" if share == 0.5 else f"{share:.0%}"
        found.append(table((f"R, k', {kept} in memory", *_speeds(speeds)), cells))
    return found
