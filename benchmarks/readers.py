"""What a model and its scores learn to read long prompts from: ``python -m benchmarks.readers talks|lessons OUT ...``.

A small chat model answers hardly any question about twenty documents, with any way of reading them, so that a pruned
prompt has no score to lose (``prefill_quality.py``). ``talks`` writes what a LoRA of the same model learns to answer
from: a few documents, and one question after the other about them, each with its answer; also texts with a question
(``--pages``) and keys of a list (``--keys``). ``lessons`` writes prompts from which ``vivace train lazy`` learns, the
kinds in turns, so that one score serves all of them; with ``--front 3`` every third question about documents stands in
front of them. Both are of half A of the rows; what is reported is asked about half B.

    python -m benchmarks.readers talks OUT.jsonl SRC [--pages FILE]... [--keys FILE]
    vivace train lora --model MODEL --data OUT.jsonl --out reader longest=2048 tokens_per_batch=2048 held_back=16
    vivace convert MERGED --model MODEL --merge reader
    python -m benchmarks.readers lessons LESSONS.jsonl --front 3 --set NAME=TASK:FILE:DOCUMENTS:COUNT ...
    vivace train lazy --model MERGED --data LESSONS.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.prefill_quality import QuestionSet, half_of
from vivace.evaluate.long_prompts import about_documents, about_keys, asked_key, question_of
from vivace.prompts import Prompt, save_prompts

DOCUMENTS = (2, 3, 4, 5, 6, 8)
"""Documents of a conversation, drawn alike."""
TIMES = 4
"""Times that each document is read, every time beside others, and each list of keys; a page is read once."""
KEYS = range(8, 21)
"""Keys of a list, drawn alike."""
ASKED_KEYS = 4
"""Keys of a list that are asked for one after the other."""


def conversations(rows: Sequence[Mapping[str, Any]], draws: Random) -> Iterator[list[dict[str, str]]]:
    """Yield conversations about lots of documents, with one question about each, in an order that is drawn.

    Args:
        rows: questions with their documents.
        draws: draws lots, and the order of questions.
    """
    order = draws.sample(rows, len(rows))
    while order:
        count = draws.choice(DOCUMENTS)
        lot, order = order[:count], order[count:]
        turns = list[dict[str, str]]()
        for row in draws.sample(lot, len(lot)):
            first = about_documents([each["ctxs"][0] for each in lot], row).request
            asked = question_of(row) if turns else str(first)
            turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": row["answers"][0]}]
        yield turns


def pages(rows: Sequence[Mapping[str, Any]], draws: Random) -> Iterator[list[dict[str, str]]]:
    """Yield a text with its question and the answer, for each row, in an order that is drawn."""
    for row in draws.sample(rows, len(rows)):
        yield [{"role": "user", "content": row["context"]}, {"role": "assistant", "content": row["answer"]}]


def keys(rows: Sequence[Mapping[str, Any]], draws: Random) -> Iterator[list[dict[str, str]]]:
    """Yield a list of keys and values with some keys asked for in turn, for each row, in an order that is drawn."""
    for row in draws.sample(rows, len(rows)):
        pairs = draws.sample(row["ordered_kv_records"], draws.choice(KEYS))
        turns = list[dict[str, str]]()
        for key, value in draws.sample(pairs, ASKED_KEYS):
            asked = about_keys(pairs, key) if not turns else asked_key(key)
            turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": value}]
        yield turns


def lessons(sets: Sequence[QuestionSet], front: int = 0) -> list[Prompt]:
    """Return questions of half A, those of the sets in turns as long as each has some.

    Args:
        sets: of questions.
        front: one of so many questions about documents stands in front of them; 0 for none.
    """
    asked = []
    for each in sets:
        own = each.questions("A", seed=7)
        if front and each.task == "multidoc":
            own[front - 1 :: front] = map(asked_in_front, own[front - 1 :: front])
        asked.append(own)
    return [question for question in chain.from_iterable(zip_longest(*asked)) if question is not None]


def asked_in_front(prompt: Prompt) -> Prompt:
    """Return a prompt about documents with its question in front of them; what is to be done stays at the end."""
    documents, _, asked = str(prompt.request).rpartition("\n\nQuestion: ")
    question, _, task = asked.partition("\n")
    return replace(prompt, request=f"Question: {question}\n{documents}\n\n{task}")


def main() -> None:
    """Write one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    talks = kinds.add_parser("talks", help="conversations for a LoRA")
    talks.add_argument("output", type=Path)
    talks.add_argument("source", type=Path, help="a public file of questions, as `vivace data multidoc` takes it")
    talks.add_argument("--pages", type=Path, action="append", default=[], help="of `vivace data reading`")
    talks.add_argument("--keys", type=Path, help="of `vivace data kv`")
    taught = kinds.add_parser("lessons", help="prompts for the scores of `vivace train lazy`")
    taught.add_argument("output", type=Path)
    taught.add_argument("--set", action="append", required=True, dest="sets", type=QuestionSet.of)
    taught.add_argument("--front", type=int, default=0, help="one of so many questions about documents is in front")
    asked = parser.parse_args()
    if asked.kind == "lessons":
        print(f"{save_prompts(asked.output, lessons(asked.sets, asked.front))} prompts of {len(asked.sets)} kinds")
        return
    kinds_of = [(conversations, asked.source, TIMES), *((pages, each, 1) for each in asked.pages)]
    kinds_of += [(keys, asked.keys, TIMES)] if asked.keys else []
    draws, written = Random(0), list[dict[str, Any]]()
    for make, source, times in kinds_of:
        rows = half_of(source, "A")
        own = [{"messages": turns} for _ in range(times) for turns in make(rows, draws)]
        print(f"{len(own)} conversations about {len(rows)} rows of {source.name}, times each: {times}")
        written += own
    asked.output.write_text("".join(json.dumps(row) + "\n" for row in draws.sample(written, len(written))))


if __name__ == "__main__":
    main()
