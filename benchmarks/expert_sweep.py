"""Find where prefetching experts pays off: ``python -m benchmarks.expert_sweep --trace FILE --out DIR``.

The simulator replays a recorded trace on given machines: caches of 10 to 75 % of the experts, 1 to 50 GB/s, and as many
predicted experts as asked for. A trace has predictions for one rate R; ``--rate R=FILE`` adds those of another, for
a quarter and half of the experts in memory. Writes ``sweep.json`` and draws ``experts.svg``: the speed-up over two
baselines, loading on demand with an LRU cache and without a cache, and the latter by R and k'. The default sizes and
times are those of a mixture like OLMoE-1B-7B in bfloat16 on an accelerator with a memory bandwidth of 800 GB/s: 12.58
MB per expert, 16 us to read one, 40 us for the rest of a layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.expert_policies import LeastRecent, OnDemand, Oracle
from benchmarks.expert_simulator import Machine, simulate
from benchmarks.expert_traces import Trace
from benchmarks.result_files import write_report
from vivace.storage.experts.policy import NextUse

SHARES = (0.1, 0.25, 0.5, 0.75)
"""Shares of the experts in memory."""
BANDWIDTHS = (1.0, 3.0, 6.0, 12.0, 25.0, 50.0)
"""Bandwidths of the device in GB/s."""
CLAIM = 2.9
"""Speed-up that the method's paper reports; cells that reach it are framed."""
RATE_SHARES = (0.25, 0.5)
"""Shares of the experts in memory for the sweep of rates."""
COUNTS = (1, 2, 3, 4)
"""Numbers k' of experts used of each prediction, for the sweep of rates."""


def asked_for(trace: Trace, count: int | None) -> Trace:
    """Keep the first ``count`` experts of every prediction."""
    return replace(trace, predictions=[replace(each, likely=each.likely[:count]) for each in trace.predictions])


def sweep(trace: Trace, num_experts: int, machine: Machine) -> list[dict[str, Any]]:
    """Simulate every share and bandwidth."""
    rows, of_layer = [], trace.num_experts
    for share in SHARES:
        for bandwidth in BANDWIDTHS:
            here = replace(machine, num_slots=max(1, round(share * num_experts)), bytes_per_s=bandwidth * 1e9)
            lru = simulate(trace, LeastRecent(), here, guesses=False)
            none = simulate(trace, OnDemand(), here, guesses=False)
            ahead = simulate(trace, NextUse(trace.num_layers, of_layer), here)
            oracle = simulate(trace, Oracle(trace), here, guesses=False)
            rows.append(
                {
                    "share": share,
                    "gb_per_s": bandwidth,
                    "ms_per_token": 1e3 * ahead.pass_s,
                    "over_lru": lru.total_s / ahead.total_s,
                    "over_on_demand": none.total_s / ahead.total_s,
                    "of_oracle": oracle.total_s / ahead.total_s,
                    "bound_over_lru": ahead.bound(lru),
                    "load_over_compute": lru.channel_s / lru.compute_s,
                    "wasted": ahead.wasted / max(1, ahead.loads),
                }
            )
    return rows


def sweep_rates(traces: Mapping[str, Trace], num_experts: int, machine: Machine) -> list[dict[str, Any]]:
    """Simulate every rate, number of predicted experts, share of the experts in memory and bandwidth."""
    rows = []
    for (rate, trace), share, bandwidth in product(traces.items(), RATE_SHARES, BANDWIDTHS):
        here = replace(machine, num_slots=max(1, round(share * num_experts)), bytes_per_s=bandwidth * 1e9)
        lru = simulate(trace, LeastRecent(), here, guesses=False)
        none = simulate(trace, OnDemand(), here, guesses=False)
        for count in COUNTS:
            ahead = simulate(asked_for(trace, count), NextUse(trace.num_layers, trace.num_experts), here)
            rows.append(
                {
                    **{"rate": rate, "count": count, "share": share, "gb_per_s": bandwidth},
                    "over_lru": lru.total_s / ahead.total_s,
                    "over_on_demand": none.total_s / ahead.total_s,
                    "wasted": ahead.wasted / max(1, ahead.loads),
                }
            )
    return rows


def draw(rows: Sequence[dict[str, Any]], rates: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a panel for each baseline and one for rates; cells of at least 2.9 times are framed."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    panels = [
        (title, "share of experts in memory", _cells(rows, key, lambda row: f"{row['share']:.0%}"))
        for key, title in (("over_lru", "beside LRU on demand"), ("over_on_demand", "beside no cache"))
    ]
    if rates:
        half = [row for row in rates if row["share"] == RATE_SHARES[-1]]
        named = _cells(half, "over_on_demand", lambda row: f"{row['rate']}, {row['count']}")
        panels.append(("beside no cache, half in memory", "R, k'", named))
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rc("svg", hashsalt="vivace", fonttype="none")
        matplotlib.rc("font", family="sans-serif", size=10)
        figure = Figure(figsize=(5 * len(panels), 3.2), layout="constrained")
        for place, (title, label, lines) in enumerate(panels):
            axis = figure.add_subplot(1, len(panels), place + 1)
            axis.imshow(list(lines.values()), cmap="Blues", vmin=0.5, vmax=4, aspect="auto", origin="lower")
            for y, line in enumerate(lines.values()):
                for x, value in enumerate(line):
                    axis.text(x, y, f"{value:.2f}", ha="center", va="center", color="white" if value > 2.6 else "black")
                    if value >= CLAIM:
                        axis.add_patch(Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, fill=False, color="#cf222e", lw=2))
            axis.set(title=title, xlabel="GB/s", ylabel=label)
            axis.set_xticks(range(len(BANDWIDTHS)), [f"{b:g}" for b in BANDWIDTHS])
            axis.set_yticks(range(len(lines)), list(lines))
        figure.savefig(path, metadata={"Date": None})
    text = path.read_text(encoding="utf-8")
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


def _cells(rows: Sequence[dict[str, Any]], key: str, name: Callable[[dict[str, Any]], str]) -> dict[str, list[float]]:
    """Return the lines of a panel by name, each along the bandwidths."""
    lines: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda row: row["gb_per_s"]):
        lines.setdefault(name(row), []).append(row[key])
    return lines


def main() -> None:
    """Simulate, write the report and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--rate", action="append", default=[], metavar="R=FILE", help="a trace of another rate")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--experts", type=int, required=True, help="of all layers of the traced model")
    parser.add_argument("--count", type=int, help="expected experts used of each guess; all of them")
    parser.add_argument("--expert-bytes", type=int, default=12_582_912)
    parser.add_argument("--expert-us", type=float, default=16.0)
    parser.add_argument("--layer-us", type=float, default=40.0)
    options = parser.parse_args()
    trace = asked_for(Trace.load(options.trace), options.count)
    machine = Machine(
        1e9, options.expert_bytes, 1, options.layer_us * 1e-6, options.expert_us * 1e-6, chunk_bytes=1 << 20
    )
    rows = sweep(trace, options.experts, machine)
    traces = {rate: Trace.load(file) for rate, _, file in (each.partition("=") for each in options.rate)}
    rates = sweep_rates(traces, options.experts, machine)
    settings = {k: v for k, v in vars(options).items() if not isinstance(v, Path) and k != "rate"}
    report = {"settings": settings, "recall": trace.recall(), "rows": rows, "rates": rates}
    write_report(options.out / "sweep.json", report)
    draw(rows, rates, options.out / "experts.svg")


if __name__ == "__main__":
    main()
