"""Measure drafts by regime: ``python -m benchmarks.regimes MODEL PROMPTS --adapter DIR --json FILE``.

A regime is a number of sequences, greedy or drawn tokens and a length of prompts, on a number of threads that a run
has throughout, as a process of a user has it. In each, every method answers the same prompts in turns, and ``auto`` is
compared with the best of the others. ``auto`` begins with what it measured in earlier regimes of this run. With
``--earlier`` it has a run behind it, as it has for a user from the second time on: an engine of its own answers other
prompts in every regime with ``auto`` first, whose measurements are kept in a folder of this benchmark (``auto.json``),
and the engine that is measured reads them.

PROMPTS is a file of ``benchmarks.chat_drafts prompts``. Long prompts are its documents, several behind one another
until they have about ``LONG`` tokens, with the last question at the end.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import vivace
from benchmarks.chat_drafts import Drawing, shown, with_a_run_behind
from benchmarks.result_files import write_report
from vivace.engine import Engine
from vivace.evaluate.benchmark import BenchmarkPrompt, run_benchmark, summarise
from vivace.evaluate.others import watched_others
from vivace.evaluate.provenance import provenance
from vivace.evaluate.systems import MethodSystem
from vivace.prompts import Prompt, load_prompts

METHODS = ("plain", "lookup", "quantized+lookup", "auto")
LONG = 1500
"""Tokens of a long prompt, about."""
TOP_P = 0.95
"""Top-p of drawn answers."""
LENGTHS = ("short", "long")
"""Lengths of prompts."""


def long_prompts(engine: Engine, rows: Sequence[Prompt], count: int) -> Iterator[str]:
    """Yield prompts of about ``LONG`` tokens, each of documents of its own."""
    texts = itertools.cycle(row.request for row in rows if row.task == "documents" and isinstance(row.request, str))
    for _ in range(count):
        found = ""
        while len(engine.tokenizer.encode(found)) < LONG:
            found = f"{found}\n\n{next(texts)}".strip()
        yield found


def short_prompts(rows: Sequence[Prompt], count: int) -> list[str]:
    """Return instructions, questions and tasks in turn."""
    sets = [
        [row.request for row in rows if row.task == task and isinstance(row.request, str)]
        for task in ("instructions", "mathematics", "code")
    ]
    return [text for group in zip(*sets, strict=False) for text in group][:count]


class Cell(NamedTuple):
    """One regime, with who answers in it and what is asked."""

    batch: int
    temperature: float
    length: str
    engine: Engine | Drawing
    prompts: list[BenchmarkPrompt]


def cells(engine: Engine, rows: Sequence[Prompt], asked: argparse.Namespace) -> Iterator[Cell]:
    """Yield all regimes; prompts of a length are the same in all of them."""
    most = max(asked.prompts, *asked.batches)
    made = {"short": partial(short_prompts, rows), "long": partial(long_prompts, engine, rows)}
    texts = {length: list(made[length](most)) for length in asked.lengths}
    encoded = {
        name: [BenchmarkPrompt(text, tuple(engine.tokenizer.encode_prompt(text))) for text in found]
        for name, found in texts.items()
    }
    for batch, temperature, length in itertools.product(asked.batches, asked.temperatures, texts):
        one = engine if temperature == 0 else Drawing(engine, temperature, TOP_P)
        yield Cell(batch, temperature, length, one, encoded[length][: max(asked.prompts, batch)])


def answer_before(engine: Engine, rows: Sequence[Prompt], asked: argparse.Namespace) -> None:
    """Answer prompts in every regime with ``auto``, which keeps what it measures for later runs."""
    for cell in cells(engine, rows, asked):
        auto = MethodSystem("auto", cell.engine, asked.tokens)
        run_benchmark([auto], cell.prompts, batch_size=cell.batch, repeats=1, warm_up=0)


def measure(engine: Engine, rows: Sequence[Prompt], asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what every method does in each regime, until the time is over."""
    started, report = time.monotonic(), []
    for batch, temperature, length, one, prompts in cells(engine, rows, asked):
        if time.monotonic() - started > asked.seconds:
            print("the time is over")
            break
        systems = [MethodSystem(name, one, asked.tokens) for name in asked.methods]
        with watched_others() as others:
            records = run_benchmark(systems, prompts, batch_size=batch, repeats=asked.repeats, warm_up=1)
        runs = summarise(records, "plain")
        tokens = sum(len(prompt.token_ids) for prompt in prompts) / len(prompts)
        head = {"category": length, "temperature": temperature, "num_prompts": len(prompts)}
        head |= {"batch": batch, "threads": asked.threads, "length": length, "prompt_tokens": tokens}
        report.append({**head, "others_cpu_share": others.cpu_share, "runs": [asdict(run) for run in runs]})
        print(shown(head, runs), flush=True)
    return report


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("file", type=Path, metavar="PROMPTS")
    parser.add_argument("--adapter", type=Path, help="draft weights of the method quantized")
    parser.add_argument("--earlier", type=Path, metavar="PROMPTS", help="prompts of a run before, which auto remembers")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0.0, 0.7])
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a regime, at least the batch")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600, help="no regime is begun after so many seconds")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    origin = asdict(provenance(torch.device("cpu")))
    adapters = {} if asked.adapter is None else {"quantized": asked.adapter}
    load = partial(vivace.load, asked.model, adapters=adapters, kernels=asked.kernels)
    with with_a_run_behind(load, asked.earlier, partial(answer_before, asked=asked)) as engine:
        report = measure(engine, load_prompts(asked.file), asked)
    if asked.json is not None:
        written = {"provenance": origin, "kernels": engine.kernels.name, "tokens": asked.tokens}
        written |= {"model": asked.model.name, "top_p": TOP_P, "repeats": asked.repeats}
        written |= {"remembered": asked.earlier is not None, "report": report}
        write_report(asked.json, written)


if __name__ == "__main__":
    main()
