"""Decode a model in a control group that allows less memory than its weights take: ``python -m benchmarks.capped``.

Every row is a process of its own. It loads its libraries, then enters a memory control group (version 1, as root), so
that what it takes from then on is limited, its page cache included; libraries are not. Rows are stores of ours
in some formats, read directly, and llama.cpp's memory map of the same weights as GGUF. Both decode greedily from the
same token ids. The file of each is dropped from the page cache before.

    python -m benchmarks.capped DIR --share 0.5 --json FILE     DIR: bf16, int8 and q4 (stores), model.gguf
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import captions
from benchmarks.result_files import write_report
from tools.blocks import table
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.evaluate.provenance import provenance
from vivace.kernels.choice import choose
from vivace.storage.loading import load_stored
from vivace.units import format_bytes

GROUP = Path("/sys/fs/cgroup/memory/vivace-capped")
"""The control group that is made for the measurement and removed after it."""
PROMPT = tuple(range(100, 132))
"""Token ids that are continued: their text does not matter for speed."""


def enter(limit: int) -> None:
    """Put this process into a new control group with a limit in bytes."""
    GROUP.mkdir(exist_ok=True)
    (GROUP / "memory.limit_in_bytes").write_text(str(limit))
    (GROUP / "memory.max_usage_in_bytes").write_text("0")
    (GROUP / "cgroup.procs").write_text(str(os.getpid()))


def drop(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_bytes() -> int:
    """Return what the kernel read from devices for this process so far."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def ours(folder: Path, limit: int, tokens: int) -> dict[str, Any]:
    """Decode with a store of ours, read directly, whose plan leaves an eighth of the limit for everything else."""
    body = choose("auto").body
    drop(folder / "weights.store")
    enter(limit)
    length = len(PROMPT) + tokens + 1
    model, storage = load_stored(folder, limit * 7 // 8, reader="direct", num_tokens=length, body=body)
    session = Session(model, num_slots=1, capacity=length)
    session.admit(Request(PROMPT, tokens, NoDrafts()))
    new: list[int] = []
    with torch.inference_mode():
        while not new:
            new += [token for emitted in session.step() for token in emitted.tokens]
        before, begun, first = read_bytes(), time.perf_counter(), len(new)
        while not session.is_idle:
            new += [token for emitted in session.step() for token in emitted.tokens]
        seconds = time.perf_counter() - begun
    return measured(new, first, seconds, before) | {"plan": storage.report}


def llama(file: Path, limit: int, tokens: int) -> dict[str, Any]:
    """Decode with llama.cpp's memory map of the same weights."""
    import numpy as np
    from llama_cpp import Llama, llama_get_logits_ith

    def likeliest() -> int:
        return int(np.ctypeslib.as_array(llama_get_logits_ith(model.ctx, -1), (model.n_vocab(),)).argmax())

    drop(file)
    enter(limit)
    size = len(PROMPT) + tokens + 1
    count = torch.get_num_threads()  # as many as ours computes with
    threads = {"n_threads": count, "n_threads_batch": count}
    model = Llama(str(file), n_ctx=size, n_batch=32, n_ubatch=32, **threads, use_mmap=True, verbose=False)
    model.eval(list(PROMPT))
    new = [likeliest()]
    before, begun = read_bytes(), time.perf_counter()
    while len(new) < tokens:
        model.eval(new[-1:])
        new.append(likeliest())
    return measured(new, 1, time.perf_counter() - begun, before) | {"plan": "memory map"}


def measured(new: list[int], first: int, seconds: float, before: int) -> dict[str, Any]:
    """Return the figures of one process."""
    count = len(new) - first
    return {
        "tokens": new,
        "tokens_per_s": count / seconds,
        "device_bytes_per_token": (read_bytes() - before) / count,
        "peak_bytes": int((GROUP / "memory.max_usage_in_bytes").read_text()),
        "times_at_limit": int((GROUP / "memory.failcnt").read_text()),
    }


def run(folder: Path, name: str, limit: int, tokens: int) -> dict[str, Any]:
    """Measure one row in a process of its own; an error is a row too."""
    words = [sys.executable, "-m", "benchmarks.capped", str(folder), "--row", name, "--limit", str(limit)]
    try:
        done = subprocess.run(
            [*words, "--tokens", str(tokens)], capture_output=True, text=True, check=False, timeout=120
        )
        ended, said = done.returncode, done.stderr
    except subprocess.TimeoutExpired:
        return {"error": "took more than 120 s"}
    finally:
        if GROUP.is_dir():
            GROUP.rmdir()
    if ended == 0:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    return {"error": "killed for memory" if ended == -9 else (said.splitlines() or ["failed"])[-1]}


def tables(path: Path) -> str:
    """Return the committed run as a table; nothing without one."""
    if not path.is_file():
        return ""
    report = json.loads(path.read_text(encoding="utf-8"))
    best = report["rows"]["bf16"].get("tokens")
    rows = []
    for name, row in report["rows"].items():
        if "error" in row:
            rows.append((name, row["error"], "", "", "", ""))
            continue
        same = sum(a == b for a, b in zip(row["tokens"], best or [], strict=False))
        rows.append(
            (
                *(name, f"{row['tokens_per_s']:.1f}", format_bytes(int(row["device_bytes_per_token"]))),
                *(format_bytes(row["peak_bytes"]), f"{row['times_at_limit']:,}", f"{same} of {len(row['tokens'])}"),
            )
        )
    caption = (
        f"{captions.heading(report['provenance'], report['kernels'])}; {report['model']}, "
        f"{format_bytes(report['model_bytes'])} in bfloat16, a control group of {format_bytes(report['limit_bytes'])}; "
        f"{report['tokens']} tokens, one run of each row in a process of its own. Libraries are not in the group. "
        "The prompt is arbitrary token ids, after which a text that differs once stays different."
    )
    heads = ("rows", "tokens/s", "read from the device a token", "most memory", "times at the limit", "tokens as bf16")
    return caption + "\n\n" + table(heads, rows)


def main() -> None:
    """Measure one row, or all of them in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default="model", help="of the model, for the table")
    parser.add_argument("--share", type=float, default=0.5, help="of the bfloat16 store, as the limit")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row")
    parser.add_argument("--limit", type=int)
    given = parser.parse_args()
    if given.row is not None:
        file = given.folder / "model.gguf"
        decode = llama(file, given.limit, given.tokens) if given.row == "llama.cpp" else None
        print(json.dumps(decode or ours(given.folder / given.row, given.limit, given.tokens)))
        return
    whole = (given.folder / "bf16" / "weights.store").stat().st_size
    limit = int(whole * given.share)
    rows: dict[str, Any] = {}
    facts = {"model": given.name, "model_bytes": whole, "limit_bytes": limit, "tokens": given.tokens}
    report = {
        "provenance": asdict(provenance(torch.device("cpu"))),
        "kernels": choose("auto").name,
        **facts,
        "rows": rows,
    }
    for name in ("bf16", "int8", "q4", "llama.cpp"):
        rows[name] = run(given.folder, name, limit, given.tokens)
        if given.json is not None:  # after every row, so that a run that is cut keeps those it has
            write_report(given.json, report)
    print(json.dumps(rows, indent=1) if given.json is None else tables(given.json))


if __name__ == "__main__":
    main()
