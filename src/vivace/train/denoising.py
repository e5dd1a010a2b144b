"""Denoising: pairs made of sources alone, on which a model learns to read and to copy before it learns to say less.

The source of a pair is a piece of a real source whose words are partly hidden, and its text is the piece as it was
(text infilling: Lewis et al. 2020, "BART", arXiv:1910.13461, section 2.2). Spans of words are replaced by one mark
each, so the model has to find out how many words are missing; all other words are to be copied. A training set of short
texts, such as summaries, says little about how to read; its sources say much more.

**Where we differ**: the mark is text, since a vocabulary may have no token for it, and a piece is as long as a text may
be. Words with which all sources begin, such as an instruction, are in no piece, so that a model can tell this task from
its own.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from vivace.errors import ConfigError
from vivace.train.variation import Pair

HIDDEN = "_"
"""What stands where words are hidden."""
_WORD = re.compile(r"\S+\s*")
_START = re.compile(r"(?:\A\s*|\n\s*|[.!?]\s+)(?=\S)")
"""What stands before the first word of a line or a sentence."""


@dataclass(frozen=True)
class DenoisingConfig:
    """How many pieces of sources are learnt from, and what is hidden in them."""

    share: float = 0.0
    """Number of pieces per real pair; 0 makes none."""
    epochs: int = 1
    """Number of epochs with pieces; those after them have the real pairs alone."""
    words: int = 60
    """Most words of a piece; one that is longer than texts may be is left out, as they are."""
    hidden: float = 0.3
    """Share of the words that are hidden, nearly."""
    span: float = 3.0
    """Mean number of words behind one mark (a geometric distribution)."""

    def __post_init__(self) -> None:
        if not 0 <= self.share < math.inf or min(self.epochs, self.words) < 1:
            raise ConfigError(
                "denoising wants a finite share >= 0, epochs >= 1 and words >= 1, found "
                f"{self.share}, {self.epochs} and {self.words}"
            )
        if not (0 < self.hidden < 1 and 1 <= self.span < math.inf):
            raise ConfigError(
                f"denoising.hidden is a share between 0 and 1 and span at least 1, found {self.hidden} and {self.span}"
            )


class Denoising:
    """Makes pairs of damaged and whole pieces of sources."""

    def __init__(self, config: DenoisingConfig, pairs: Sequence[Pair]) -> None:
        """Collect the sources, each once.

        Args:
            config: how many pieces, and what is hidden.
            pairs: the pairs to train on, whose sources are plain texts.
        """
        self.config = config
        sources = list(dict.fromkeys(source for source, _ in pairs))
        same = _same_beginning(sources)
        self._sources = [source[same:] for source in sources if source[same:].strip()]
        self._count = int(len(pairs) * config.share)

    def drawn(self, rng: random.Random, epoch: int) -> list[Pair]:
        """Return the pairs of an epoch; none after ``epochs`` of them, or where the sources have no words."""
        if epoch >= self.config.epochs or not self._sources:
            return []
        pieces = (self._piece(rng.choice(self._sources), rng) for _ in range(self._count))
        return [(damaged(piece, self.config, rng), "".join(piece).strip()) for piece in pieces]

    def _piece(self, source: str, rng: random.Random) -> list[str]:
        """Return words of a source in their order, with the white space behind them, from a line or sentence on."""
        first = rng.choice([found.end() for found in _START.finditer(source)])
        return _WORD.findall(source[first:])[: self.config.words]


def _same_beginning(texts: Sequence[str]) -> int:
    """Return the number of characters of the words with which all of two or more texts begin."""
    if len(texts) < 2:
        return 0
    first, last = min(texts), max(texts)  # what these two share, all texts between them share
    at = next((index for index, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    while at and not first[at - 1].isspace():
        at -= 1
    return at


def damaged(words: Sequence[str], config: DenoisingConfig, rng: random.Random) -> str:
    """Return words as one text in which spans are hidden; at least one is hidden, and of two one stays.

    Args:
        words: words with the white space behind them; one of them or more.
        config: the share of words to hide and the mean length of a span.
        rng: generator of the random choices.
    """
    starts = config.hidden / (config.span * (1 - config.hidden))  # chance of a span at a word that is not hidden
    goes_on = 1 - 1 / config.span
    hidden: list[bool] = []
    for _ in words:
        hidden.append(rng.random() < (goes_on if hidden and hidden[-1] else starts))
    if len(set(hidden)) == 1:  # all or none: another fate for one of them
        at = rng.randrange(len(words))
        hidden[at] = len(words) == 1 or not hidden[at]
    shown: list[str] = []
    for index, word in enumerate(words):
        if not hidden[index]:
            shown.append(word)
        elif index == 0 or not hidden[index - 1]:
            shown.append(HIDDEN + " ")
    return "".join(shown).strip()
