"""Throughput of OpenAI-compatible servers at several concurrencies, taken in turns: ``python -m benchmarks.serving``.

Tokens are counted from ``usage``, never from events. Every server answers the same prompts in every round, so that what
else the machine does hits all of them alike. Start the servers yourself, with the same model, dtype and threads:

    vivace serve --model M --port 8000
    transformers serve --port 8001        # and once more with its continuous batching
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from openai import OpenAI

from vivace.evaluate.provenance import provenance
from vivace.prompts import PACKAGED, load_prompts, packaged_prompts


def answer(client: OpenAI, model: str, prompt: str, max_tokens: int) -> int:
    """New tokens of one greedy answer."""
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens, temperature=0
    )
    assert reply.usage is not None, "the server must count its tokens"
    return reply.usage.completion_tokens


def measure(url: str, model: str, prompts: list[str], concurrency: int, max_tokens: int) -> dict[str, Any]:
    """Answer all prompts, ``concurrency`` at a time."""
    client = OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none", max_retries=0, timeout=600)
    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        counts = list(pool.map(lambda prompt: answer(client, model, prompt, max_tokens), prompts))
    elapsed = time.perf_counter() - started
    return {"tokens": sum(counts), "seconds": elapsed, "tokens_per_s": sum(counts) / elapsed}


def main() -> None:
    """Measure, print medians, write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=MODEL@URL", help="repeatable")
    parser.add_argument("--concurrency", default="1,8,16")
    parser.add_argument("--prompts", default="e2e", help=f"a .jsonl file, or one of {', '.join(PACKAGED)}")
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    rows = packaged_prompts(asked.prompts) if asked.prompts in PACKAGED else load_prompts(asked.prompts)
    prompts = [str(row.request) for row in rows[: asked.limit]]
    servers = {name: rest.rpartition("@")[::2] for name, _, rest in (word.partition("=") for word in asked.server)}
    runs = []
    for model, url in servers.values():
        measure(url, model, prompts[:4], 4, asked.max_tokens)  # warm up
    for concurrency in map(int, asked.concurrency.split(",")):
        rates: dict[str, list[float]] = {name: [] for name in servers}
        for repeat in range(asked.repeats):
            for name, (model, url) in servers.items():
                found = measure(url, model, prompts, concurrency, asked.max_tokens)
                runs.append({"server": name, "concurrency": concurrency, "repeat": repeat, **found})
                rates[name].append(found["tokens_per_s"])
        first = statistics.median(next(iter(rates.values())))
        for name, values in rates.items():
            rate = statistics.median(values)
            print(f"{concurrency:3d} at once  {name:24s} {rate:8.1f} tokens/s  {rate / first:5.2f}x the first")
    settings = {"prompts": asked.prompts, "limit": asked.limit, "max_tokens": asked.max_tokens}
    made = {"provenance": dataclasses.asdict(provenance(torch.device("cpu"))), "settings": settings, "runs": runs}
    asked.json.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
