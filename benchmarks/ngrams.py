"""Barring repeated n-grams in one pass, beside transformers: ``python -m benchmarks.ngrams --json OUT``.

Both take turns on the same texts, of few different tokens, so that about half of them bar one; the logits of a
vocabulary of 50,265 tokens are copied before the clock starts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from transformers import NoRepeatNGramLogitsProcessor

from benchmarks.result_files import write_report
from vivace.core.sampling import bar_repeats
from vivace.evaluate.provenance import provenance

ROWS, LENGTH, VOCAB, SIZE = 64, 500, 50265, 3
REPEATS = 101
DIFFERENT = 30
"""Number of different tokens in the texts."""


def ours(texts: Tensor, scores: Tensor) -> Tensor:
    """Bar them in place."""
    bar_repeats(scores, texts, SIZE)
    return scores


def seconds(work: Callable[[Tensor, Tensor], Tensor], texts: Tensor, scores: Tensor) -> float:
    """Return how long one call takes."""
    copied = scores.clone()
    started = time.perf_counter()
    work(texts, copied)
    return time.perf_counter() - started


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, DIFFERENT, (ROWS, LENGTH), generator=generator)
    scores = torch.randn(ROWS, VOCAB, generator=generator)
    theirs = NoRepeatNGramLogitsProcessor(SIZE)
    assert torch.equal(theirs(texts, scores.clone()), ours(texts, scores.clone()))
    taken: dict[str, list[float]] = {"vivace": [], "transformers": []}
    for _ in range(REPEATS):
        taken["vivace"].append(seconds(ours, texts, scores))
        taken["transformers"].append(seconds(theirs, texts, scores))
    found = {name: median(times) for name, times in taken.items()}
    setting = {"rows": ROWS, "length": LENGTH, "different": DIFFERENT, "vocab": VOCAB, "ngram": SIZE}
    setting |= {"repeats": REPEATS}
    ratio = found["transformers"] / found["vivace"]
    report = {
        "provenance": asdict(provenance(torch.device("cpu"))),
        "setting": setting,
        "seconds": found,
        "ratio": ratio,
    }
    write_report(given.json, report)


if __name__ == "__main__":
    main()
