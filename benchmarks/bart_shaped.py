"""A random checkpoint of BART-large's shape, and prompts for it: what a step costs depends on the shape alone.

``python -m benchmarks.bart_shaped ARTICLES OUT`` reads a file with one JSON object a line (``article``, or ``prompt``)
and writes ``OUT/model``, with a tokenizer of the articles' words, and ``OUT/prompts.jsonl``. A random model never ends
a text by itself, so measure with ``--min-new-tokens`` equal to ``--max-new-tokens``.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
VOCAB = 50265
LONGEST = 1024
"""Tokens that the encoder has positions for."""


def articles_of(path: Path, count: int) -> list[str]:
    """Return the texts of the first lines of a file."""
    opener = partial(gzip.open, mode="rt") if path.suffix == ".gz" else open
    with opener(path, encoding="utf-8") as lines:
        rows = [json.loads(str(line)) for line, _ in zip(lines, range(count), strict=False)]
    return [str(row.get("article") or row["prompt"]) for row in rows]


def cut(text: str, splitter: pre_tokenizers.Whitespace) -> str:
    """Return the beginning of a text that BART's encoder can read."""
    words = splitter.pre_tokenize_str(text)[:LONGEST]
    return text[: words[-1][1][1]]


def main() -> None:
    """Write the checkpoint and its prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("articles", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=16)
    given = parser.parse_args()
    splitter = pre_tokenizers.Whitespace()
    texts = [cut(text, splitter) for text in articles_of(given.articles, given.count)]
    words = Counter(word for text in texts for word, _ in splitter.pre_tokenize_str(text))
    known = [*SPECIAL, *(word for word, _ in words.most_common(VOCAB - len(SPECIAL)))]
    known += [f"<filler-{place}>" for place in range(VOCAB - len(known))]
    inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate(known)}, "<unk>"))
    inner.pre_tokenizer = splitter
    named = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder = given.out / "model"
    PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=LONGEST, **named).save_pretrained(folder)
    torch.manual_seed(0)
    config = BartConfig(forced_eos_token_id=None)  # the defaults are those of BART-large
    model = BartForConditionalGeneration(config).to(torch.bfloat16)
    model.generation_config.forced_eos_token_id = None
    model.save_pretrained(folder)
    lines = (json.dumps({"prompt": text}) + "\n" for text in texts)
    (given.out / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
