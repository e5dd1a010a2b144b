"""Measure drafts on chat by category: ``python -m benchmarks.chat_drafts run MODEL PROMPTS --json FILE``.

``prompts DATA OUT`` writes three prompt files from public data sets, a folder for each: ``measured.jsonl`` with six
categories as Spec-Bench has them (Xia et al. 2024, arXiv:2401.07851), the category of a row being its "task",
``tuned.jsonl`` with other rows of the same sets, for ``vivace tune``, and ``trained.jsonl`` with rows of neither, which
a recipe that learns from the model's own answers may be given (``--data``). Conversations are turns of MT-bench, the
answer between two of them the model's own; they and questions about documents are not among the rows to train on.

``run`` lets every method answer the prompts of a category in turns, greedily and at a temperature, and prints one table
for each: the speed of decoding relative to plain decoding, with a bootstrap interval over prompts. With ``--earlier``
an engine of its own answers other prompts before, and ``auto`` remembers what it measured with them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

import vivace
from benchmarks.result_files import write_report
from vivace.engine import Engine
from vivace.evaluate.benchmark import BenchmarkPrompt, Run, System, run_benchmark, summarise
from vivace.evaluate.others import watched_others
from vivace.evaluate.provenance import provenance
from vivace.evaluate.systems import MethodSystem
from vivace.prompts import Message, Prompt, load_prompts, save_prompts

METHODS = ("plain", "lookup", "lookahead", "quantized", "quantized+lookup", "auto")
DOCUMENTS = 4
"""Documents before a question of the category ``documents``; one of them has the answer."""
TUNED = 8
"""Rows of each data set that are for tuning."""
NOT_TRAINED = ("conversation", "documents")
"""Categories of which nothing is trained on: MT-bench has too few rows, and prompts of documents are too long."""


def _rows(data: Path, name: str) -> list[dict[str, Any]]:
    with gzip.open(data / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    random.Random(name).shuffle(rows)
    return rows


def _instruction(row: Mapping[str, str]) -> str:
    return row["instruction"] + (f"\n\n{row['input']}" if row["input"] else "")


def _article(row: Mapping[str, str]) -> str:
    return f"Summarize this article.\n\n{' '.join(row['article'].split()[:500])}"


def _documents(row: Mapping[str, Any], others: Sequence[Mapping[str, Any]], draws: random.Random) -> str:
    """Return a question after passages, of which the one with the answer is at a random place."""
    passages = [row["ctxs"][0], *(other["ctxs"][0] for other in draws.sample(others, DOCUMENTS - 1))]
    draws.shuffle(passages)
    shown = "\n\n".join(f"Document: {passage['title']}\n{passage['text']}" for passage in passages)
    return f"{shown}\n\nAnswer with the documents above: {row['question']}?"


def categories(data: Path) -> Iterator[tuple[str, list[str | list[Message]]]]:
    """Yield the name of a data set's category and its prompts in a random order that is always the same."""
    first: Callable[[str], list[Message]] = lambda text: [{"role": "user", "content": text}]  # noqa: E731
    turns = [row["turns"] for row in _rows(data, "mt_bench/question")]
    both = [first(pair[0]) for pair in turns], [[*first(pair[0]), *first(pair[1])] for pair in turns]
    yield "conversation", [turn for pair in zip(*both, strict=True) for turn in pair]
    yield "instructions", [_instruction(row) for row in _rows(data, "alpaca/alpaca_train")]
    yield "instructions", [_instruction(row) for row in _rows(data, "dolly/dolly_3k_train")]
    yield "mathematics", [row["question"] for row in _rows(data, "gsm8k/train")]
    yield "summaries", [_article(row) for row in _rows(data, "cnndm_128/cnndm_dev")]
    yield "summaries", [f"Summarize this dialogue.\n\n{row['dialogue']}" for row in _rows(data, "dialogsum/dev")]
    yield "code", [f"{row['text']} Use Python." for row in _rows(data, "code/mbpp_prompt_train_val")]
    rows, draws = _rows(data, "lost_in_the_middle/nq_open_oracle_half0"), random.Random(0)
    others = rows[200:]
    yield "documents", [_documents(row, others, draws) for row in rows[:200]]


def write_prompts(data: Path, out: Path, count: int, learnt: int) -> None:
    """Write ``count`` prompts of each category to measure, others to tune with, and ``learnt`` of each set to train."""
    measured: dict[str, list[Prompt]] = {}
    tuned: list[Prompt] = []
    trained: list[Prompt] = []
    for task, prompts in categories(data):
        rows = [Prompt(request, (), task) for request in prompts]
        tuned += rows[:TUNED]
        measured.setdefault(task, []).extend(rows[TUNED : TUNED + count])
        if task not in NOT_TRAINED:
            trained += rows[TUNED + count :][:learnt]
    random.Random(0).shuffle(tuned)
    random.Random(0).shuffle(trained)
    save_prompts(out / "trained.jsonl", trained)
    for task, rows in measured.items():
        sets = [rows[first : first + count] for first in range(0, len(rows), count)]
        measured[task] = [row for group in zip(*sets, strict=True) for row in group]  # sets of a category take turns
    kept = [row for rows in measured.values() for row in rows[:count]]
    save_prompts(out / "measured.jsonl", kept)
    save_prompts(out / "tuned.jsonl", [row for row in tuned if isinstance(row.request, str)])


def write_texts(data: Path, out: Path, count: int) -> None:
    """Write beginnings of texts (encyclopedic paragraphs) and of code (a task and the first half of its solution)."""
    with gzip.open(data / "wikitext2" / "wiki.valid.raw.txt.gz", "rt", encoding="utf-8") as file:
        paragraphs = [line.strip() for line in file if len(line.split()) > 100]
    random.Random("texts").shuffle(paragraphs)
    prompts = [Prompt(" ".join(text.split()[:60]), (), "text") for text in paragraphs[:count]]
    for row in _rows(data, "code/mbpp_prompt_train_val")[:count]:
        lines = row["code"].replace("\r", "").splitlines()
        begun = "\n".join(lines[: max(1, len(lines) // 2)])
        prompts.append(Prompt(f"# {row['text']}\n{begun}\n", (), "code"))
    save_prompts(out, prompts)


@dataclass(frozen=True)
class Drawing:
    """An engine whose answers are drawn at a temperature."""

    engine: Engine
    temperature: float
    top_p: float = 1.0

    @property
    def model(self) -> Any:
        """The decoder."""
        return self.engine.model

    def logits(self, token_ids: Any) -> Any:
        """Return the next-token logits at every position."""
        return self.engine.logits(token_ids)

    def generate(self, prompts: Any, **options: Any) -> Any:
        """Answer prompts together, with one seed for all methods."""
        drawn = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "seed": 7}
        return self.engine.generate(prompts, **{**options, **drawn})


@contextmanager
def with_a_run_behind(
    load: Callable[..., Engine], earlier: Path | None, answer: Callable[[Engine, Sequence[Prompt]], None]
) -> Iterator[Engine]:
    """Give an engine whose ``auto`` remembers what another one measured, or nothing, and leave no trace of either.

    Args:
        load: loads an engine, given whether it remembers.
        earlier: prompts of the run before; None is no such run.
        answer: lets the first engine answer them.
    """
    known = os.environ.get("VIVACE_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VIVACE_CACHE_DIR"] = folder
        try:
            if earlier is not None:
                answer(load(remember=True), load_prompts(earlier))
            yield load(remember=earlier is not None)
        finally:
            if known is None:
                del os.environ["VIVACE_CACHE_DIR"]
            else:
                os.environ["VIVACE_CACHE_DIR"] = known


def answered(engine: Engine, rows: Sequence[Prompt], tokens: int) -> list[BenchmarkPrompt]:
    """Return the prompts with the model's own answers between the turns of conversations."""
    found = []
    for row in rows:
        if isinstance(row.request, str) and not engine.tokenizer.has_template:
            found.append(BenchmarkPrompt(row.request, tuple(engine.tokenizer.encode_prompt(row.request))))
            continue
        asked = [{"role": "user", "content": row.request}] if isinstance(row.request, str) else row.request
        messages = cast("list[Message]", asked)
        said: list[Message] = []
        for message in messages:
            if said:
                answer = engine.generate(said, method="plain", do_sample=False, max_new_tokens=tokens)[0].text
                said.append({"role": "assistant", "content": answer})
            said.append(message)
        found.append(BenchmarkPrompt(said, tuple(engine.tokenizer.encode_prompt(said))))
    return found


def measure(engine: Engine, rows: Sequence[Prompt], asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what every method does in every category at every temperature."""

    def systems(temperature: float) -> list[MethodSystem]:
        one = engine if temperature == 0 else Drawing(engine, temperature)
        return [MethodSystem(name, one, asked.max_new_tokens) for name in asked.methods]

    return report_of(engine, rows, asked, systems)


def answer_before(engine: Engine, rows: Sequence[Prompt], asked: argparse.Namespace) -> None:
    """Answer prompts of every category at every temperature with ``auto``, which keeps what it measures."""
    prompts = answered(engine, rows, asked.max_new_tokens)
    for temperature in asked.temperatures:
        one = engine if temperature == 0 else Drawing(engine, temperature)
        auto = MethodSystem("auto", one, asked.max_new_tokens)
        run_benchmark([auto], prompts, batch_size=asked.batch, repeats=1, warm_up=0)


def report_of(
    engine: Engine,
    rows: Sequence[Prompt],
    asked: argparse.Namespace,
    systems: Callable[[float], Sequence[System]],
) -> list[dict[str, Any]]:
    """Return what the systems for each temperature do in every category, compared with "plain" among them."""
    report = []
    tasks = list(dict.fromkeys(str(row.task) for row in rows))
    for task in tasks:
        prompts = answered(engine, [row for row in rows if row.task == task][: asked.limit], asked.max_new_tokens)
        lengths = [len(prompt.token_ids) for prompt in prompts]
        for temperature in asked.temperatures:
            with watched_others() as others:
                records = run_benchmark(
                    systems(temperature), prompts, batch_size=asked.batch, repeats=asked.repeats, warm_up=1
                )
            runs = summarise(records, "plain")
            head = {"category": task, "temperature": temperature, "num_prompts": len(prompts), "batch": asked.batch}
            head |= {"prompt_tokens": sum(lengths) / len(lengths), "others_cpu_share": others.cpu_share}
            report.append({**head, "runs": [asdict(run) for run in runs]})
            print(shown(head, runs), flush=True)
    return report


def shown(head: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Return one line for each method of a category."""
    title = f"{head['category']}, temperature {head['temperature']:g}, {head['num_prompts']} prompts of "
    lines = [f"{title}{head['prompt_tokens']:.0f} tokens, batch {head['batch']}"]
    for run in runs:
        low, high = run.speedup_interval
        kept = "" if run.mean_acceptance_length is None else f"{run.mean_acceptance_length:.2f} tokens a pass"
        same = "same text" if run.identical else f"{run.num_different} other texts"
        lines.append(
            f"  {run.method:18}{run.tokens_per_s:8.1f}/s {run.speedup:.2f}x ({low:.2f} to {high:.2f}) {kept:22} {same}"
        )
    return "\n".join(lines)


def means(report: Sequence[Mapping[str, Any]]) -> str:
    """Return the mean over categories of each method's speed-up, by temperature."""
    lines = []
    for temperature in dict.fromkeys(part["temperature"] for part in report):
        parts = [part for part in report if part["temperature"] == temperature]
        names = [run["method"] for run in parts[0]["runs"]]
        mean = {name: sum(part["runs"][at]["speedup"] for part in parts) / len(parts) for at, name in enumerate(names)}
        each = ", ".join(f"{name} {value:.2f}x" for name, value in mean.items())
        lines.append(f"mean of {len(parts)} categories at temperature {temperature:g}: {each}")
    return "\n".join(lines)


def main() -> None:
    """Write prompts, or measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("prompts", help="write prompt files from public data sets")
    made.add_argument("data", type=Path)
    made.add_argument("out", type=Path)
    made.add_argument("--count", type=int, default=30, help="prompts of each category")
    made.add_argument("--learnt", type=int, default=300, help="prompts of each set to train on")
    texts = commands.add_parser("texts", help="write a prompt file for a base model: beginnings of texts and of code")
    texts.add_argument("data", type=Path)
    texts.add_argument("out", type=Path)
    texts.add_argument("--count", type=int, default=30, help="prompts of each category")
    run = commands.add_parser("run", help="measure")
    run.add_argument("model", type=Path)
    run.add_argument("prompts", type=Path)
    run.add_argument("--adapter", type=Path, action="append", default=[], help="draft weights, repeatable")
    run.add_argument("--earlier", type=Path, metavar="PROMPTS", help="prompts of a run before, which auto remembers")
    run.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    run.add_argument("--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0.0, 0.7])
    run.add_argument("--limit", type=int, default=30, help="prompts of each category")
    run.add_argument("--tokens", dest="max_new_tokens", type=int, default=128)
    run.add_argument("--batch", type=int, default=1)
    run.add_argument("--repeats", type=int, default=1)
    run.add_argument("--threads", type=int, default=0)
    run.add_argument("--kernels", default="auto")
    run.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.command == "prompts":
        write_prompts(asked.data, asked.out, asked.count, asked.learnt)
        return
    if asked.command == "texts":
        write_texts(asked.data, asked.out, asked.count)
        return
    if asked.threads:
        torch.set_num_threads(asked.threads)
    origin = asdict(provenance(torch.device("cpu")))
    kinds = {
        json.loads((folder / "config.json").read_text(encoding="utf-8"))["kind"]: folder for folder in asked.adapter
    }
    load = partial(vivace.load, asked.model, adapters=kinds, kernels=asked.kernels)
    with with_a_run_behind(load, asked.earlier, partial(answer_before, asked=asked)) as engine:
        report = measure(engine, load_prompts(asked.prompts), asked)
    print(means(report))
    if asked.json is not None:
        plans = {
            kind: json.loads((folder / "config.json").read_text(encoding="utf-8")) for kind, folder in kinds.items()
        }
        written = {"provenance": origin, "kernels": engine.kernels.name, "threads": torch.get_num_threads()}
        written |= {"tokens": asked.max_new_tokens, "remembered": asked.earlier is not None}
        written |= {"model": asked.model.name, "adapters": {kind: plan["plan"] for kind, plan in plans.items()}}
        write_report(asked.json, {**written, "report": report})


if __name__ == "__main__":
    main()
