"""Throughput of ``vivace serve`` beside ``transformers serve``: one run, the servers in turns, the same prompts.

It starts the servers itself, all with the same checkpoint, dtype and threads, and needs ``accelerate`` for those of
transformers:

    python -m benchmarks.serving --model MODEL --out serving.json

``transformers`` answers one request after the other; ``transformers-batching`` is the same server with
``--continuous-batching``, which also runs on a CPU. ``vivace-plain`` drafts nothing and shows the gain from batching
alone. Our prompt cache is off, since every server sees the same prompts in every round. Tokens are counted from
``usage``, never from events; vivace counts the end token and transformers does not, so answers per second are shown
too. A round only begins if it is likely to end within ``--minutes``.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import torch
from openai import OpenAI

from benchmarks.result_files import write_report
from vivace.engine import SHIPPED
from vivace.evaluate.provenance import provenance
from vivace.prompts import PACKAGED, load_prompts, packaged_prompts

OURS = ("-m", "vivace", "serve", "--prefix-cache", "0", "--dtype", "{dtype}", "--model", "{model}", "--quiet")
THEIRS = ("-m", "transformers.cli.transformers", "serve", "{model}", "--device", "cpu")
SERVERS: dict[str, tuple[str, ...]] = {
    "vivace": OURS,
    "vivace-plain": (*OURS, "--method", "plain"),
    "transformers": (*THEIRS, "--dtype", "{dtype}"),
    "transformers-batching": (*THEIRS, "--dtype", "{dtype}", "--continuous-batching"),
}
START_S = 300


@dataclass(frozen=True)
class Server:
    """A server that is listening."""

    name: str
    url: str
    model: str
    """Its name of the checkpoint."""

    def passes(self) -> float | None:
        """Return the number of decoding passes of the model so far; None for servers that do not report it."""
        found = re.search(r"^vivace_target_passes_total\S* (\S+)", _get(f"{self.url}/metrics"), re.M)
        return float(found[1]) if found else None


@dataclass(frozen=True)
class Run:
    """All prompts answered once."""

    server: str
    concurrency: int
    repeat: int
    tokens: int
    answers: int
    seconds: float
    passes: float | None

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def main() -> None:
    """Start the servers, measure, print medians and write everything."""
    asked = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers are stopped then too
    rows = packaged_prompts(asked.prompts) if asked.prompts in PACKAGED else load_prompts(asked.prompts)
    prompts = [str(row.request) for row in rows[: asked.limit]]
    names, levels = asked.servers.split(","), [int(word) for word in asked.concurrency.split(",")]
    ends_at = time.monotonic() + 60 * asked.minutes
    with ExitStack() as stack, TemporaryDirectory() as logs:
        servers = [
            stack.enter_context(start(name, asked.model, asked.dtype, asked.threads, Path(logs))) for name in names
        ]
        for server in servers:
            print(f"warming up {server.name}", flush=True)
            measure(server, prompts[: max(levels)], max(levels), asked.max_tokens)
        runs, texts = _rounds(servers, prompts, levels, asked, ends_at)
        told = {server.name: _get(f"{server.url}/version") for server in servers}
    same = {key: _identical(found, texts[names[0], key[1]][0]) for key, found in texts.items()}
    table = [_line(name, level, runs, same[name, level], len(prompts)) for level in levels for name in names]
    for line in table:
        told_of = "{concurrency:3d} at once  {server:22s} {tokens_per_s:8.1f} tokens/s  {ours_over_it:5.2f}  "
        print((told_of + "{identical_answers}").format(**line))
    print(f"{names[0]} says {told[names[0]]}")
    print(f"last columns: {names[0]} in units of it; answers that are {names[0]}'s of the first round in every round")
    made = {
        "provenance": asdict(provenance(torch.device("cpu"))),
        "settings": {key: str(value) for key, value in vars(asked).items() if key != "out"}
        | {"model": asked.model.name},
        "commands": {name: ["python", *SERVERS[name]] for name in names},
        "servers": told,
        "table": table,
        "runs": [asdict(run) for run in runs],
    }
    write_report(asked.out, made)


def _arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHIPPED, help="a checkpoint folder; left out: the shipped one")
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--concurrency", default="8,16")
    parser.add_argument("--prompts", default="e2e", help=f"a .jsonl file, or one of {', '.join(PACKAGED)}")
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every server")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no round that would end later")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


@contextmanager
def start(name: str, model: Path, dtype: str, threads: int, logs: Path) -> Iterator[Server]:
    """Start a server and yield it during a block.

    Args:
        name: one of ``SERVERS``.
        model: the checkpoint.
        dtype: dtype of the weights.
        threads: number of threads for everything it computes.
        logs: folder for what it prints.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [word.format(model=model.resolve(), dtype=dtype) for word in SERVERS[name]]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    print(f"starting {name}", flush=True)
    log = logs / name
    with log.open("w") as out:
        command = [sys.executable, *words, "--port", str(port)]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not _get(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{name} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield Server(name, url, model.resolve().name if words[1] == "vivace" else str(model.resolve()))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()


def _get(url: str) -> str:
    """Return the content of an address; empty if it does not answer."""
    with httpx2.Client(verify=False, timeout=10) as client:  # no certificates are read for plain HTTP
        try:
            reply = client.get(url)
        except httpx2.TransportError:
            return ""
    return reply.text if reply.status_code == 200 else ""


def measure(server: Server, prompts: Sequence[str], concurrency: int, max_tokens: int) -> tuple[Run, list[str]]:
    """Answer all prompts, ``concurrency`` at a time; return the run and the texts."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)

    def answer(prompt: str) -> tuple[int, str]:
        reply = client.chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens, temperature=0
        )
        assert reply.usage is not None, "the server must count its tokens"
        return reply.usage.completion_tokens, reply.choices[0].message.content or ""

    before, started = server.passes(), time.perf_counter()
    pool = ThreadPoolExecutor(concurrency)
    try:
        found = list(pool.map(answer, prompts))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # who stops us does not wait for answers
    elapsed, after = time.perf_counter() - started, server.passes()
    passes = None if before is None or after is None else after - before
    tokens = sum(count for count, _ in found)
    return Run(server.name, concurrency, 0, tokens, len(found), elapsed, passes), [text for _, text in found]


def _rounds(
    servers: Sequence[Server], prompts: Sequence[str], levels: Sequence[int], asked: argparse.Namespace, ends_at: float
) -> tuple[list[Run], dict[tuple[str, int], list[list[str]]]]:
    """Measure every server at every concurrency, in turns, at least one round; return the runs, and the texts of all
    rounds by server and concurrency.
    """
    runs: list[Run] = []
    texts: dict[tuple[str, int], list[list[str]]] = {}
    for repeat in range(asked.repeats):
        began = time.monotonic()
        for concurrency in levels:
            for server in servers:
                run, found = measure(server, prompts, concurrency, asked.max_tokens)
                texts.setdefault((server.name, concurrency), []).append(found)
                runs.append(Run(**{**asdict(run), "repeat": repeat}))
                print(f"round {repeat + 1}, {concurrency} at once, {server.name}: {run.rate:.1f} tokens/s", flush=True)
        if 2 * time.monotonic() - began > ends_at:
            print(f"{repeat + 1} rounds: another would not end in time", flush=True)
            break
    return runs, texts


def _identical(rounds: Sequence[Sequence[str]], expected: Sequence[str]) -> int:
    """Return the number of prompts that got the expected text in every round."""
    return sum(all(text == wanted for text in texts) for wanted, *texts in zip(expected, *rounds, strict=True))


def _line(name: str, concurrency: int, runs: Sequence[Run], same: int, num_prompts: int) -> dict[str, Any]:
    """Return the medians of a server, and its speed relative to the first one."""
    own = [run for run in runs if run.server == name and run.concurrency == concurrency]
    first = [run for run in runs if run.server == runs[0].server and run.concurrency == concurrency]
    rate = statistics.median([run.rate for run in own])
    return {
        "server": name,
        "concurrency": concurrency,
        "repeats": len(own),
        "tokens_per_s": rate,
        "slowest": min(run.rate for run in own),
        "quickest": max(run.rate for run in own),
        "answers_per_s": statistics.median([run.answers / run.seconds for run in own]),
        "ours_over_it": statistics.median([run.rate for run in first]) / rate,
        "tokens_per_pass": statistics.median([run.tokens / run.passes for run in own if run.passes] or [0]) or None,
        "identical_answers": f"{same} of {num_prompts}",
    }


if __name__ == "__main__":
    main()
