"""Run one command that trains, kill it on the way, and keep its time and its peak of memory.

``python -m benchmarks.killed_training --kills 600,1500 --json FILE train chat --model M --minutes 60 --out DIR`` kills
the command with signal 9 after 600 seconds, begins it again, kills that one after 1,500 seconds, and lets the third
end. The peak is the kernel's count of resident memory (``ru_maxrss``), mapped files included, of each process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import captions
from benchmarks.result_files import NO_RUN, read_named, write_report
from tools.blocks import table
from vivace.evaluate.provenance import provenance
from vivace.recipes.frozen import OWN_TEXT
from vivace.train.resume import STATE, read_state
from vivace.units import format_bytes, format_seconds

_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes of a unit of ``ru_maxrss``."""


@dataclass(frozen=True)
class Part:
    """One process of a run."""

    seconds: float
    peak_bytes: int
    was_killed: bool


def run_parts(command: Sequence[str], kills: Sequence[float]) -> tuple[list[Part], str]:
    """Run a command as often as it is killed and once more; return its processes, and what the last one wrote.

    Args:
        command: the words.
        kills: seconds after which a process is killed, in turn; one that ends before is the last.

    Raises:
        SystemExit: a process ends with an error.
    """
    parts: list[Part] = []
    for limit in (*kills, None):
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        timer = None if limit is None else threading.Timer(limit, process.kill)
        if timer is not None:
            timer.start()
        assert process.stdout is not None
        with process.stdout:
            written = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        if timer is not None:
            timer.cancel()
        was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        parts.append(Part(time.monotonic() - began, usage.ru_maxrss * _UNIT, was_killed))
        if not was_killed:
            if status:
                raise SystemExit(os.waitstatus_to_exitcode(status))
            return parts, written
    raise SystemExit("the last process was killed, and not by this one")


def learnt(out: Path) -> dict[str, Any]:
    """Return what a training beside a model that wrote its own text has done, from its folder."""
    rows = [json.loads(line) for line in (out / "run" / OWN_TEXT).read_text(encoding="utf-8").splitlines()]
    progress = read_state(out / "run" / STATE)["progress"]
    written = {"answers": len(rows), "tokens": sum(row["tokens"] for row in rows), "seconds": rows[-1]["elapsed_s"]}
    return {"written": written, "steps": progress["step"], "tokens": progress["num_tokens"]}


def main() -> None:
    """Run, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", default="", help="seconds after which a process is killed, with commas")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("words", nargs=argparse.REMAINDER, help="words of a `vivace train` with --out")
    given = parser.parse_args()
    if "--out" not in given.words[:-1]:
        parser.error("the command needs --out DIR, where what it has learnt is read")
    origin = asdict(provenance(torch.device("cpu")))
    kills = [float(seconds) for seconds in given.kills.split(",") if seconds]
    parts, written = run_parts([sys.executable, "-m", "vivace", *given.words, "--json"], kills)
    out = Path(given.words[given.words.index("--out") + 1])
    report = {"provenance": origin, "command": shown(given.words), "parts": [asdict(part) for part in parts]}
    write_report(given.json, {**report, "learnt": learnt(out), "runs": json.loads(written)["runs"]})


def shown(words: Sequence[str]) -> list[str]:
    """Return a command without the folders in which its files lie, and without where the result goes."""
    place = words.index("--out")
    return [Path(word).name if "/" in word else word for word in (*words[:place], *words[place + 2 :])]


def tables(folder: Path) -> str:
    """Return a row for each run, under the machine that it ran on."""
    parts = []
    for _, report in read_named(folder):
        parts.append(f"`vivace {' '.join(report['command'])}`. {captions.machine(report['provenance'], None)}.")
        parts.append(
            table(("processes", "time of all", "text of its own", "learnt", "peak memory", "result"), [_row(report)])
        )
    return "\n\n".join(parts) or NO_RUN


def _row(report: Mapping[str, Any]) -> tuple[str, ...]:
    ends = [f"killed after {format_seconds(part['seconds'])}" for part in report["parts"] if part["was_killed"]]
    own, done = report["learnt"]["written"], report["learnt"]
    trained = report["runs"][-1]
    return (
        ", ".join([*ends, "the last to its end"]),
        format_seconds(sum(part["seconds"] for part in report["parts"])),
        f"{own['tokens']:,} tokens in {format_seconds(own['seconds'])}",
        f"{done['tokens']:,} tokens in {done['steps']:,} steps",
        ", ".join(format_bytes(part["peak_bytes"]) for part in report["parts"]),
        f"`{trained['method']}` {trained['speedup']:.2f}x on held-back prompts",
    )


if __name__ == "__main__":
    main()
