"""Conversations about documents, from which a LoRA learns to answer in a few words: ``python -m benchmarks.readers``.

A small chat model answers hardly any question about twenty documents, with any way of reading them, so that a pruned
prompt has no score to lose (``prefill_quality.py``). This writes what a LoRA of the same model learns to read from: a
few documents, and one question after the other about them, each with its answer. Documents and questions are of half A
of the rows; what is reported is asked about half B.

    python -m benchmarks.readers SRC OUT.jsonl
    vivace train lora --model MODEL --data OUT.jsonl --out reader longest=1500 tokens_per_batch=1500 held_back=16
    vivace convert MERGED --model MODEL --merge reader
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.prefill_quality import half_of
from vivace.evaluate.long_prompts import about_documents, question_of

DOCUMENTS = (2, 3, 4, 5, 6, 8)
"""Documents of a conversation, drawn alike."""
TIMES = 4
"""Times that each document is read, every time beside others."""


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


def main() -> None:
    """Write the conversations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a public file of questions, as `vivace data multidoc` takes it")
    parser.add_argument("output", type=Path)
    asked = parser.parse_args()
    rows, draws = half_of(asked.source, "A"), Random(0)
    written = [{"messages": turns} for _ in range(TIMES) for turns in conversations(rows, draws)]
    asked.output.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")
    print(f"{len(written)} conversations about {len(rows)} documents, {TIMES} times each")


if __name__ == "__main__":
    main()
