"""Swap LoRAs under load: ``python -m benchmarks.swapping MODEL --clients 32 --adapters 24 --room 6 --seconds 60``.

Clients ask one worker, as the server's, for short answers with LoRAs that are drawn anew for each request, of which
only a few fit into memory together. The same load runs before with the LoRAs that fit, so that none is read again. What
is reported: answers that differ from those written alone, the largest memory of the adapters, how long reading one into
memory takes, the time between tokens of both loads, and by how much the process grows while LoRAs come and go.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import Queue
from statistics import median
from typing import Any

import torch

import vivace
from benchmarks.adapters import make_loras
from benchmarks.result_files import write_report
from vivace.adapters.registry import Registry
from vivace.decode.request import Emitted
from vivace.engine import Engine, Options
from vivace.evaluate.memory import resident_memory
from vivace.evaluate.others import watched_others
from vivace.evaluate.provenance import provenance
from vivace.serve.worker import Event, Failed, Job, Worker

PROMPTS = ("Name three rivers.", "Why is the sky blue?", "What is a list?", "Say hello.")
TOKENS = 16
WATCH_S = 0.5
SAME_S = 0.001
"""Events of one answer that are no further apart came from one call."""


@dataclass
class Load:
    """What a load has shown."""

    num_answers: int = 0
    num_wrong: int = 0
    num_failed: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    """Time between the blocks of tokens of one answer."""
    most_bytes: int = 0
    """Of the adapters in memory."""
    resident: list[int] = field(default_factory=list)
    """Bytes of the whole process in memory, twice a second."""

    @property
    def grown_bytes(self) -> int:
        """By how much the process has grown: the middle of the last quarter of the load less that of the second one.

        The first quarter is left out, in which each LoRA is read for the first time.
        """
        quarter = len(self.resident) // 4
        if not quarter:
            return 0
        return round(median(self.resident[-quarter:]) - median(self.resident[quarter : 2 * quarter]))

    def facts(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        gaps = sorted(self.gaps_ms)
        at = {f"p{share}_ms": round(gaps[min(len(gaps) - 1, len(gaps) * share // 100)], 3) for share in (50, 99)}
        counted = {"answers": self.num_answers, "wrong": self.num_wrong, "failed": self.num_failed}
        return {**counted, **at, "most_adapter_bytes": self.most_bytes}


def answers_of(engine: Engine, names: Sequence[str]) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return what each LoRA answers by itself."""
    found = {}
    for name in names:
        results = engine.generate(list(PROMPTS), adapter=name, **_settings())
        found.update({(name, prompt): r.token_ids for prompt, r in zip(PROMPTS, results, strict=True)})
    return found


def _settings() -> dict[str, Any]:
    return {"method": "plain", "max_new_tokens": TOKENS, "ignore_eos": True, "do_sample": False}


def load(
    engine: Engine, names: Sequence[str], right: dict[tuple[str, str], tuple[int, ...]], clients: int, seconds: float
) -> Load:
    """Let clients ask until the time is over; return what came of it."""
    found, lock, boxes = Load(), threading.Lock(), dict[Job, Queue[Event]]()

    def deliver(events: list[tuple[Job, Event]]) -> None:
        for job, event in events:
            boxes[job].put(event)

    capacity = max(len(engine.tokenizer.encode_prompt(prompt)) for prompt in PROMPTS) + TOKENS
    worker = Worker(
        engine.model,
        deliver,
        num_slots=clients,
        capacity=capacity,
        max_queue=clients,
        prefill_budget=256,
        memory=engine.memory,
    )
    worker.start()
    ends = time.perf_counter() + seconds

    def client(number: int) -> None:
        rng = random.Random(number)
        while time.perf_counter() < ends:
            name, prompt = rng.choice(list(names)), rng.choice(PROMPTS)
            request = engine.request(prompt, replace(Options.of(_settings()), adapter=name))
            job = Job(request, 0, False, None, None)
            boxes[job] = Queue()
            worker.submit([job])
            tokens, gaps, last = list[int](), list[float](), 0.0
            while True:
                event = boxes[job].get()
                if isinstance(event, Failed):
                    break
                assert isinstance(event, Emitted)
                now, tokens = time.perf_counter(), [*tokens, *event.tokens]
                if not last or now - last > SAME_S:  # events of one native call come together
                    gaps += [1e3 * (now - last)] if last else []
                    last = now
                if event.finish_reason is not None:
                    break
            with lock:
                found.num_answers += 1
                found.num_failed += isinstance(event, Failed)
                found.num_wrong += not isinstance(event, Failed) and tuple(tokens) != right[name, prompt]
                found.gaps_ms += gaps
                found.most_bytes = max(found.most_bytes, engine.adapters.num_bytes)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    while time.perf_counter() < ends:
        found.resident.append(resident_memory() or 0)
        time.sleep(WATCH_S)
    for thread in threads:
        thread.join()
    worker.close()
    return found


def timed_reads(registry: Registry) -> list[float]:
    """Have the registry note how long reading an adapter back into memory takes; return the list that it fills."""
    seconds: list[float] = []
    read = registry._read

    def timed(known: Any) -> Any:
        begun = time.perf_counter()
        found = read(known)
        seconds.append(time.perf_counter() - begun)
        return found

    registry._read = timed  # type: ignore[method-assign]
    return seconds


def measure(model: Path, *, clients: int, adapters: int, room: int, seconds: float, rank: int = 16) -> dict[str, Any]:
    """Return the figures of the load without swaps and of the one with them."""
    with tempfile.TemporaryDirectory() as folder:
        loras = make_loras(model, Path(folder), adapters, rank)
        engine = vivace.load(model, adapters=loras)
        names, each = list(loras), engine.adapters.num_bytes // adapters
        right = answers_of(engine, names)
        engine.adapters.limit(room * each + each // 2)
        still = load(engine, names[-room:], right, clients, seconds)
        before = engine.adapters.num_loads
        reads = timed_reads(engine.adapters)
        swapped = load(engine, names, right, clients, seconds)
        swaps = sorted(1e3 * each for each in reads)
        return {
            "model": model.name,
            "clients": clients,
            "adapters": adapters,
            "room": room,
            "seconds": seconds,
            "rank": rank,
            "adapter_bytes": each,
            "budget_bytes": engine.adapters.max_bytes,
            "without_swaps": still.facts(),
            "with_swaps": swapped.facts(),
            "swaps": engine.adapters.num_loads - before,
            "swap_p50_ms": round(swaps[len(swaps) // 2], 2) if swaps else None,
            "swap_p99_ms": round(swaps[min(len(swaps) - 1, len(swaps) * 99 // 100)], 2) if swaps else None,
            "grown_kib": swapped.grown_bytes >> 10,
        }


def main() -> None:
    """Measure and write a result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    for name, value in (("clients", 32), ("adapters", 24), ("room", 6), ("rank", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", type=Path)
    given = vars(parser.parse_args())
    target = given.pop("json")
    with watched_others() as others:
        found = measure(given.pop("model"), **given)
    found["cpu_share_of_others"] = others.cpu_share
    report = {"provenance": asdict(provenance(torch.device("cpu"))), "swapping": found}
    print(json.dumps(report, indent=1))
    if target is not None:
        write_report(target, report)


if __name__ == "__main__":
    main()
