"""What each part of beam search brings: ``python -m benchmarks.beam_ablation MODEL PROMPTS --json OUT``.

MODEL is an encoder-decoder, PROMPTS a file of sources or a packaged set (e2e). Every row of the result does the whole
way from text to text, in one dtype, and has all that the rows above it have, in the order of FastSeq's table (Yan et
al. 2021, arXiv:2106.04718): transformers as it is; sources and beginnings once for all beams, on modules of PyTorch;
native kernels; n-grams barred in one pass over all windows, where transformers has a dictionary for each text;
``vivace batch``, which sorts prompts by length and, with ``--workers``, tokenizes in processes of their own (their
start, seconds that a short file does not win back, is counted); the encoder's states in the place of keys and values
(EL-attention). Rows take turns, repeat by repeat.

The largest batch is computed, not tried: what is left of so much memory beside the weights, over the bytes of the
longest source and of the longest text with all its beams. Working memory comes on top of that in every row.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import NoRepeatNGramLogitsProcessor

import vivace
from benchmarks.result_files import write_report
from vivace.answer import Answer
from vivace.batch.run import answer_file
from vivace.cli.prompting import read_prompts
from vivace.core.footprint import held_bytes
from vivace.engine import Engine, Options
from vivace.evaluate.beam_peers import TransformersBeams
from vivace.evaluate.ctranslate2 import Search
from vivace.evaluate.provenance import provenance

GIB = (2, 4, 8)
"""Sizes of memory for which the largest batch is computed."""
System = Callable[[Sequence[str]], list[str]]
"""Answers prompts, all of them."""


@dataclass(frozen=True)
class Part:
    """A row: how prompts are answered, and what that keeps in memory."""

    label: str
    answer: System
    weight_bytes: int
    source_bytes: int
    """Of the longest source, as it is kept while its text is written."""
    text_bytes: int
    """Of the longest text, with all its beams."""

    def largest_batch(self, gib: int) -> int:
        """Return how many inputs fit into so much memory, 0 where the weights alone do not."""
        left = gib * 2**30 - self.weight_bytes
        return max(0, left // (self.source_bytes + self.text_bytes))


class Setting:
    """What all rows share: the search, the size of a batch and the prompts."""

    def __init__(self, texts: Sequence[str], search: Search, batch: int) -> None:
        """Take prompts, of which ``batch`` are answered together."""
        self.texts, self.search, self.batch = list(texts), search, batch
        self.options = Options.of(search._asdict())
        self.kernels = self.model = ""
        """Names, set with the rows."""

    def batches(self, texts: Sequence[str]) -> list[Sequence[str]]:
        """Divide prompts, in their order."""
        return [texts[first : first + self.batch] for first in range(0, len(texts), self.batch)]


def stock(engine: Engine, dtype: str, setting: Setting) -> Part:
    """Return transformers: every beam has a copy of its source's keys and values, and of its text's."""
    tokenizer, search, c = engine.tokenizer, setting.search, engine.model.config
    model = TransformersBeams(engine.folder, dtype, True, tokenizer.eos_ids)

    def answer(texts: Sequence[str]) -> list[str]:
        found = [
            one
            for batch in setting.batches(texts)
            for one in model([tokenizer.encode_prompt(text) for text in batch], search)
        ]
        return [tokenizer.decode(list(tokens)) for tokens in found]

    weights = sum({part.data_ptr(): part.nbytes for part in model.model.parameters()}.values())
    entry = 2 * c.num_layers * c.num_kv_heads * c.head_dim * getattr(torch, dtype).itemsize * search.num_beams
    longest = max(len(tokenizer.encode_prompt(text)) for text in setting.texts)
    return Part("transformers", answer, weights, longest * entry, (1 + search.max_new_tokens) * entry)


def ours(label: str, engine: Engine, setting: Setting, answer: System) -> Part:
    """Return a row of this program, with what its sources and texts take."""
    longest = max(len(engine.tokenizer.encode_prompt(text)) for text in setting.texts)
    text = engine.model.slot_bytes(1 + setting.search.max_new_tokens * setting.search.num_beams)
    return Part(label, answer, held_bytes(engine.model)[0], engine.model.source_bytes(longest), text)


def with_dictionaries(engine: Engine, setting: Setting) -> System:
    """Return an engine whose repeated n-grams are barred as transformers bars them, row by row."""
    size = setting.search.no_repeat_ngram_size
    options = replace(setting.options, no_repeat_ngram_size=0, batch_size=setting.batch)

    def answer(texts: Sequence[str]) -> list[str]:
        answers: list[Answer] = []
        for batch in setting.batches(texts):
            requests = [engine.request(text, options) for text in batch]
            requests = [replace(one, processors=(NoRepeatNGramLogitsProcessor(size),)) for one in requests]
            session = engine.session(requests, options)
            own = {session.admit(one): Answer(engine.tokenizer, one, options.method) for one in requests}
            for emitted in session.drain():
                own[emitted.request_id].take(emitted)
            answers += own.values()
        return [one.result().text for one in answers]

    return answer


def in_one_pass(engine: Engine, setting: Setting) -> System:
    """Return an engine as it is."""
    settings = setting.search._asdict()

    def answer(texts: Sequence[str]) -> list[str]:
        found = [engine.generate(list(batch), batch_size=len(batch), **settings) for batch in setting.batches(texts)]
        return [one.text for batch in found for one in batch]

    return answer


def in_a_pipeline(engine: Engine, setting: Setting, workers: int) -> System:
    """Return an engine behind ``vivace batch``; a batch has as many tokens as one of the longest inputs."""
    options, search = setting.options, setting.search
    longest = max(len(engine.tokenizer.encode_prompt(text)) for text in setting.texts)
    tokens = setting.batch * (longest + 1 + search.num_beams * search.max_new_tokens)

    def answer(texts: Sequence[str]) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            source, output = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
            source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
            answer_file(engine, source, output, options, num_workers=workers, batch_tokens=tokens)
            return [json.loads(line)["text"] for line in output.read_text(encoding="utf-8").splitlines()]

    return answer


def parts(model: str, dtype: str, setting: Setting, workers: int) -> list[Part]:
    """Return all rows, each with an engine of its own where it needs one."""
    plain = vivace.load(model, dtype=dtype, kernels="torch", attention="shared")
    native = vivace.load(model, dtype=dtype, attention="shared")
    el = vivace.load(model, dtype=dtype, attention="el")
    setting.kernels, setting.model = native.kernels.name, native.folder.name
    return [
        stock(plain, dtype, setting),
        ours("+ shared", plain, setting, with_dictionaries(plain, setting)),
        ours("+ native", native, setting, with_dictionaries(native, setting)),
        ours("+ n-gram pass", native, setting, in_one_pass(native, setting)),
        ours("+ pipeline", native, setting, in_a_pipeline(native, setting, workers)),
        ours("+ el", el, setting, in_a_pipeline(el, setting, workers)),
    ]


def measure(rows: Sequence[Part], setting: Setting, repeats: int) -> list[dict[str, Any]]:
    """Let rows take turns; return seconds and byte counts of each, and how many texts differ from the first row's."""
    seconds: list[list[float]] = [[] for _ in rows]
    texts: list[list[str]] = [[] for _ in rows]
    for part in rows:
        part.answer(setting.texts[:1])
    for _ in range(repeats):
        for place, part in enumerate(rows):
            started = time.perf_counter()
            texts[place] = part.answer(setting.texts)
            seconds[place].append(time.perf_counter() - started)
    return [
        {
            "label": part.label,
            "seconds": own,
            "ms_per_input": 1e3 * median(own) / len(setting.texts),
            "num_different": sum(one.split() != other.split() for one, other in zip(found, texts[0], strict=True)),
            "weight_bytes": part.weight_bytes,
            "cross_cache_bytes": setting.batch * part.source_bytes,
            "text_bytes": setting.batch * part.text_bytes,
            "largest_batch": {str(gib): part.largest_batch(gib) for gib in GIB},
        }
        for part, own, found in zip(rows, seconds, texts, strict=True)
    ]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--json", type=Path, required=True)
    for name, value in {"limit": 8, "batch": 8, "repeats": 1, "threads": 1, "workers": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in {"num-beams": 4, "max-new-tokens": 140, "min-new-tokens": 0, "no-repeat-ngram-size": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--length-penalty", type=float, default=1.0)
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    search = Search(
        given.num_beams, given.max_new_tokens, given.min_new_tokens, given.length_penalty, given.no_repeat_ngram_size
    )
    texts = [str(row.request) for row in read_prompts(given.prompts, given.limit)]
    setting = Setting(texts, search, given.batch)
    rows = parts(given.model, given.dtype, setting, given.workers)
    asked = {name: getattr(given, name) for name in ("batch", "repeats", "threads", "workers", "dtype")}
    report = {
        "provenance": asdict(provenance(torch.device("cpu"))),
        "setting": asked
        | search._asdict()
        | {"num_prompts": len(texts), "kernels": setting.kernels, "model": setting.model},
        "rows": measure(rows, setting, given.repeats),
    }
    write_report(given.json, report)


if __name__ == "__main__":
    main()
