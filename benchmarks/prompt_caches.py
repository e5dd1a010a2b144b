"""Measure a prompt cache on disk: ``python -m benchmarks.prompt_caches MODEL --json FILE``.

Every reading is a process of its own, so that nothing is left in memory but what the operating system keeps of files:
first one that reads the prompt and writes the cache, then one that finds it on disk, and this several times, each time
with an empty folder. The prompts are packaged texts one behind the other, cut at a number of tokens. Each process says
how long the first token took from the moment the request was given to the session, and a digest of all entries.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import vivace
from benchmarks import captions
from benchmarks.result_files import tables_of, write_report
from tools.blocks import table
from vivace.decode.session import Session
from vivace.engine import Engine, Options
from vivace.evaluate.others import watched_others
from vivace.evaluate.provenance import provenance
from vivace.prompts import packaged_prompts


def prompt_of(engine: Engine, length: int) -> list[int]:
    """Return a prompt of so many tokens."""
    tokens: list[int] = []
    while len(tokens) < length:
        for name in ("chat", "e2e", "sql"):
            for prompt in packaged_prompts(name):
                tokens += engine.tokenizer.encode(str(prompt.request) + "\n")
    return tokens[:length]


def read_once(model: str, folder: str, length: int) -> dict[str, Any]:
    """Read a prompt with a cache on disk; return the seconds to the first token and what was stored."""
    started = time.perf_counter()
    engine = vivace.load(model, prompt_cache=folder)
    load_s = time.perf_counter() - started
    engine.generate(prompt_of(engine, 40)[1:], max_new_tokens=2)  # the first pass of a process takes longer
    prompt = prompt_of(engine, length)
    session = Session(engine.model, num_slots=1, capacity=length + 8, memory=engine.memory)
    request = engine.request(prompt, Options(max_new_tokens=4, method="plain", ignore_eos=True))
    started = time.perf_counter()
    session.admit(request)
    while not (emitted := session.step()):
        pass
    first_token_s = time.perf_counter() - started
    digest = hashlib.sha256()
    for layer in range(engine.model.config.num_layers):
        for part in session.cache.span(layer, 0, 0, length - 1):
            digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    started = time.perf_counter()
    assert engine.prompt_cache is not None
    engine.prompt_cache.flush()
    return {
        "load_s": load_s,
        "first_token_s": first_token_s,
        "flush_s": time.perf_counter() - started,
        "num_cached_tokens": emitted[0].stats.num_cached_tokens,
        "token": emitted[0].tokens[0],
        "entries": digest.hexdigest(),
        "bytes": engine.prompt_cache.directory.num_bytes,
        "kernels": engine.kernels.name,
    }


def measure(model: str, length: int, repeats: int) -> dict[str, Any]:
    """Return the readings with an empty folder and with what these have written, in turns."""
    readings: dict[str, list[dict[str, Any]]] = {"empty": [], "from disk": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            for kind in readings:
                words = [sys.executable, "-m", "benchmarks.prompt_caches", model, "--length", str(length)]
                found = subprocess.run([*words, "--once", folder], stdout=subprocess.PIPE, text=True, check=True)
                readings[kind].append(json.loads(found.stdout))
    times = {kind: statistics.median(one["first_token_s"] for one in found) for kind, found in readings.items()}
    return {
        "length": length,
        "first_token_s": times,
        "share": times["from disk"] / times["empty"],
        "is_equal": len({(one["entries"], one["token"]) for found in readings.values() for one in found}) == 1,
        "readings": readings,
    }


def tables(folder: Path) -> str:
    """Return the table of all committed runs."""
    return tables_of(folder, _tables)


def _tables(written: Mapping[str, Any]) -> list[str]:
    setting, rows = written["setting"], []
    for report in written["reports"]:
        one = report["readings"]["from disk"][0]
        rows.append(
            (
                f"{report['length']:,}",
                f"{report['first_token_s']['empty'] * 1e3:,.0f} ms",
                f"{report['first_token_s']['from disk'] * 1e3:,.0f} ms",
                f"{report['share']:.1%}",
                f"{one['bytes'] / 1e6:.0f} MB",
                "equal" if report["is_equal"] else "**different**",
            )
        )
    caption = (
        f"{captions.heading(written['provenance'], setting['kernels'])}{captions.others(setting)}; "
        f"{setting['model']}, median of {setting['repeats']} processes each, files in the page cache."
    )
    headings = ("prompt tokens", "first token, read", "from disk", "share", "folder", "entries and first token")
    return [caption, table(headings, rows)]


def main() -> None:
    """Measure and write the report, or read once in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, nargs="+", default=[1024, 3400, 7600])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--once", help="read the prompt in this process, with this folder")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.once is not None:
        print(json.dumps(read_once(asked.model, asked.once, asked.length[0])))
        return
    with watched_others() as others:
        reports = [measure(asked.model, length, asked.repeats) for length in asked.length]
    for report in reports:
        print(report["length"], report["first_token_s"], f"{report['share']:.3f}", report["is_equal"], flush=True)
    setting = {
        "model": Path(asked.model).name,
        "kernels": reports[0]["readings"]["empty"][0]["kernels"],
        "repeats": asked.repeats,
        "others_cpu_share": others.cpu_share,
    }
    if asked.json is not None:
        written = {"provenance": asdict(provenance(torch.device("cpu"))), "setting": setting, "reports": reports}
        write_report(asked.json, written)


if __name__ == "__main__":
    main()
