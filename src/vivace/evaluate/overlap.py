"""Overlap of generated texts with reference texts: BLEU and ROUGE-L with several references per text.

BLEU is sacrebleu's (Papineni et al. 2002; Post 2018, arXiv 1804.08771), over the whole set, case-sensitive, with its
``13a`` tokenisation. ROUGE-L is rouge-score's F-measure (Lin 2004), without stemming: for each text the best of its
references, then the mean. Both are on the usual scale of 0 to 100. The two packages are in the extra ``bench``.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import zip_longest
from typing import Any

from vivace.errors import ConfigError, DependencyError


def bleu(texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return the corpus BLEU of texts, each with its own references.

    Args:
        texts: generated texts.
        references: at least one right answer for each text; the numbers may differ.

    Raises:
        ConfigError: the lengths differ, or a text has no reference.
        DependencyError: sacrebleu is missing.
    """
    _check(texts, references)
    sacrebleu = _package("sacrebleu")
    streams = [list(stream) for stream in zip_longest(*references)]
    return float(sacrebleu.BLEU().corpus_score(list(texts), streams).score) if streams else 0.0


def rouge_l(texts: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Return the ROUGE-L of each text with the best of its references.

    Raises:
        ConfigError: the lengths differ, or a text has no reference.
        DependencyError: rouge-score is missing.
    """
    _check(texts, references)
    scorer = _package("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=False)
    return [
        100.0 * max(scorer.score(reference, text)["rougeL"].fmeasure for reference in answers)
        for text, answers in zip(texts, references, strict=True)
    ]


def _check(texts: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Refuse texts without references."""
    if len(texts) != len(references):
        raise ConfigError(f"{len(texts)} texts to score, but references for {len(references)}")
    empty = [index for index, answers in enumerate(references) if not answers]
    if empty:
        raise ConfigError(f"{len(empty)} of {len(texts)} texts have no reference, the first is number {empty[0] + 1}")


def _package(name: str) -> Any:
    """Import an optional package.

    Raises:
        DependencyError: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise DependencyError(f"{name.split('.')[0]} is not installed; run: pip install 'vivace[bench]'") from error
