"""Measure every way to share a model among ranks over links of several speeds, and write one result file.

All ranks are started here, so that whoever freezes other processes meanwhile lets them run:

    python -m benchmarks.parallel --model DIR --lengths 2k,4k,8k --links none,100 --out parallel.json
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.links import Network, measured_rate, network
from benchmarks.result_files import write_report

WAYS = "one,tensor,tensor:lowbit,sequence,sequence-causal,pipeline,runahead-even,runahead-model,runahead"


def measure(net: Network, model: str, words: list[str], limit_s: float) -> dict[str, Any]:
    """Return the report of ``vivace bench parallel`` on a network, or what it had when the limit ended it.

    Raises:
        RuntimeError: a rank failed before anything was measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "report.json")
        command = [sys.executable, "-m", "benchmarks.links", "bench", "parallel", "--model", model, *words]
        command += ["--json", str(out)] + ([] if net.interface is None else ["--link-interface", net.interface])
        net.start(command)
        statuses = net.wait(limit_s)
        if not out.is_file():
            raise RuntimeError(f"ranks ended with {statuses}")
        found: dict[str, Any] = json.loads(out.read_text())
        return {**found, "statuses": statuses}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--lengths", default="512,2k")
    parser.add_argument("--links", default="none,100", help="rates in Mbit/s; none has no limit")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cpu-share", type=float, default=1.0)
    parser.add_argument("--kind", default=None)
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--new-tokens", default="16")
    parser.add_argument("--search", default="5")
    parser.add_argument("--repeats", default="1")
    parser.add_argument("--limit-s", type=float, default=420)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # what was made is removed
    cells = []
    for link in given.links.split(","):
        mbit = None if link == "none" else float(link)
        with network(given.ranks, kind=given.kind, mbit=mbit, cpu_share=given.cpu_share) as net:
            rate = measured_rate(net)
            words = ["--lengths", given.lengths, "--ways", given.ways, "--batches", given.batches]
            words += ["--new-tokens", given.new_tokens, "--search", given.search, "--repeats", given.repeats]
            report = measure(net, given.model, words, given.limit_s)
            facts = {"kind": net.kind, "mbit": mbit, "measured_mbit": rate * 8 / 1e6, "cpu_share": net.cpu_share}
            cells.append({"link": {**facts, "ranks": net.num_ranks}, **report})
            write_report(given.out, {"is_simulated": False, "cells": cells})


if __name__ == "__main__":
    main()
