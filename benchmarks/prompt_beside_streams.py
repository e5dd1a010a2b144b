"""A long prompt beside eight streams: ``python -m benchmarks.prompt_beside_streams MODEL --json FILE``.

A server answers eight streams. First nothing else runs; then a prompt of ``--tokens`` tokens is read beside them, in
full and pruned, each several times. Measured are the seconds between two tokens of a stream, over all streams while
the prompt is read: the 99th percentile of those with the prompt should be at most twice that without. The answer to
the long prompt must have the ids that it has when nothing else runs. ``--prefill-budget`` is the server's: a chunk of
more rows is divided by layers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import torch

from benchmarks import captions
from benchmarks.result_files import tables_of, write_report
from benchmarks.server_process import server_process
from tools.blocks import table
from vivace.evaluate.provenance import provenance

STREAMS = 8
WAYS: dict[str, dict[str, Any]] = {"full": {}, "lazy": {"prefill": "lazy", "keep": "balanced"}}
"""Ways in which the long prompt is read."""
QUIET_S = 6.0
"""Seconds for which streams run by themselves."""


class Streams:
    """Streams that begin again when they end, and the times at which each had a token."""

    def __init__(self, url: str, tokens: int) -> None:
        """Let every stream write ``tokens`` tokens each time."""
        self._url, self._tokens = url, tokens
        self._over = threading.Event()
        self.times: list[list[float]] = [[] for _ in range(STREAMS)]
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(STREAMS)]

    def __enter__(self) -> Streams:
        """Start them."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End them."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        prompt = [1000 + 31 * number + place for place in range(16)]
        body = {"prompt": prompt, "max_tokens": self._tokens, "ignore_eos": True, "stream": True}
        with httpx2.Client(base_url=self._url, timeout=300) as client:
            while not self._over.is_set():
                self.times[number].append(float("nan"))  # the wait for a first token is none between two
                with client.stream("POST", "/v1/completions", json=body) as reply:
                    for line in reply.iter_lines():
                        if line.startswith("data: {"):
                            self.times[number].append(time.perf_counter())
                        if self._over.is_set():
                            break

    def gaps(self, since: float, until: float) -> list[float]:
        """Return the seconds between two tokens, of those that came between two times."""
        found: list[float] = []
        for times in self.times:
            for before, after in pairwise(times):
                if before == before and after == after and since <= after and before <= until:
                    found.append(after - before)
        return found


def percentiles(gaps: Sequence[float]) -> dict[str, float]:
    """Return what is reported of the seconds between tokens."""
    return {
        "count": len(gaps),
        "median_s": float(np.median(gaps)),
        "p99_s": float(np.percentile(gaps, 99)),
        "longest_s": max(gaps),
    }


def measure(url: str, prompt: Sequence[int], repeats: int) -> dict[str, Any]:
    """Return the seconds between tokens without the prompt and with it, in each way of reading it."""
    body = {"prompt": list(prompt), "max_tokens": 8, "ignore_eos": True, "return_token_ids": True, "min_prompt": None}
    with httpx2.Client(base_url=url, timeout=600) as client:

        def ask(way: dict[str, Any]) -> list[int]:
            reply = client.post("/v1/completions", json={**body, **way, "cache_salt": str(time.perf_counter())})
            if not reply.is_success:
                raise SystemExit(f"the server refused the prompt: {reply.text}")
            ids: list[int] = reply.json()["choices"][0]["token_ids"]
            return ids

        alone = {name: ask(way) for name, way in WAYS.items()}
        found: dict[str, Any] = {}
        with Streams(url, 400) as streams:
            time.sleep(2)
            since = time.perf_counter()
            time.sleep(QUIET_S)
            found["without"] = percentiles(streams.gaps(since, time.perf_counter()))
            for name, way in WAYS.items():
                gaps, seconds, same = list[float](), list[float](), True
                for _ in range(repeats):
                    since = time.perf_counter()
                    same &= ask(way) == alone[name]
                    until = time.perf_counter()
                    seconds.append(until - since)
                    time.sleep(0.3)  # until the tokens of the last step have come
                    gaps += streams.gaps(since, until)
                found[name] = {**percentiles(gaps), "answered_s": float(np.median(seconds)), "same_ids": same}
                found[name]["p99_ratio"] = found[name]["p99_s"] / found["without"]["p99_s"]
    return found


def tables(folder: Path) -> str:
    """Return a row for each budget and way of reading, of all committed runs."""
    return tables_of(folder, _tables)


def _tables(written: Mapping[str, Any]) -> list[str]:
    origin, setting, rows = written["provenance"], written["setting"], []
    for budget, found in written["found"].items():
        for name, own in found.items():
            ratio = f"{own['p99_ratio']:.1f}x" if "p99_ratio" in own else ""
            figures = [f"{1e3 * own[key]:.0f} ms" for key in ("median_s", "p99_s", "longest_s")]
            answered = f"{own['answered_s']:.1f} s" if "answered_s" in own else ""
            same = "" if "same_ids" not in own else "yes" if own["same_ids"] else "no"
            rows.append((budget, name, *figures, ratio, answered, same))
    caption = (
        f"{captions.heading(origin, origin['best_kernels'])}; {setting['model']}, a prompt of "
        f"{setting['tokens']:,} tokens beside {setting['streams']} streams."
    )
    heads = ("budget", "prompt", "between tokens", "99 %", "longest", "beside none", "answered", "ids as alone")
    return [caption, table(heads, rows)]


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--prefill-budget", type=int, action="append", dest="budgets")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    prompt = [100 + (7919 * place) % 20000 for place in range(asked.tokens)]
    found = {}
    for budget in asked.budgets or [256]:
        words = ("--model", asked.model, "--method", "plain", "--prefill-budget", str(budget))
        with (
            tempfile.TemporaryDirectory() as folder,
            server_process(*words, log=Path(folder) / "server.log") as (url, _),
        ):
            found[str(budget)] = measure(url, prompt, asked.repeats)
    print(json.dumps(found, indent=1))
    if asked.json is not None:
        setting = {"model": Path(asked.model).name, "tokens": asked.tokens, "streams": STREAMS}
        written = {"provenance": asdict(provenance(torch.device("cpu"))), "setting": setting, "found": found}
        write_report(asked.json, written)


if __name__ == "__main__":
    main()
