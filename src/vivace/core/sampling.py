"""From logits to the law a token is drawn from, and the drawing.

Processors run in the order of Hugging Face's ``generate``: repetition penalty, forbidden n-grams,
suppressed tokens, temperature, top-k, top-p, min-p. They see the prefix a position would have, drafted
tokens included, so a speculative decoder applies exactly the law plain decoding would.

Every finite setting gives a distribution. Scores saturate at the largest float32 instead of overflowing, and a row
that its temperature would carry out of float32 is divided in float64 after its highest score was subtracted, which
leaves the distribution what it is. Rows that stay in range are computed as without these rules, to the bit. Where
every token is excluded there is no distribution: the row is all zeros, and drawing from it raises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from vivace.errors import ConfigError, DecodingError, NoTokenError

LARGEST = torch.finfo(torch.float32).max
"""Scores saturate here."""
PENALTIES = (2.0**-126, 2.0**126)
"""Repetition penalties beyond these change no score further: float32 has no normal numbers for them."""


@dataclass(frozen=True)
class Sampling:
    """How one request draws its tokens (Hugging Face argument names)."""

    do_sample: bool = False
    """False takes the most likely token after penalties."""
    temperature: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set whose probability reaches p (Holtzman et al. 2019, arXiv:1904.09751)."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens already in the text (Keskar et al. 2019)."""
    no_repeat_ngram_size: int = 0
    """Never repeat an n-gram of this length; 0 allows all."""

    def __post_init__(self) -> None:
        rules = (
            ("temperature", self.temperature, self.temperature >= 0, ">= 0"),
            ("top_k", self.top_k, self.top_k >= 0, ">= 0"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "> 0"),
            ("no_repeat_ngram_size", self.no_repeat_ngram_size, self.no_repeat_ngram_size >= 0, ">= 0"),
        )
        for name, value, holds, allowed in rules:
            if not (_is_finite(value) and holds):
                raise ConfigError(f"{name} must be {allowed}, found {value}")

    @property
    def is_greedy(self) -> bool:
        """The most likely token is taken; temperature 0 means the same."""
        return not self.do_sample or self.temperature == 0

    @property
    def reads_prefix(self) -> bool:
        """Whether the law depends on earlier tokens beyond the logits."""
        return self.repetition_penalty != 1.0 or self.no_repeat_ngram_size > 0

    @property
    def is_argmax(self) -> bool:
        """Greedy with nothing to process: the argmax of the logits is the answer."""
        return self.is_greedy and not self.reads_prefix


def _is_finite(value: float) -> bool:
    """Whether a number is one that float64 has, or a whole one, of which the large stand for all."""
    return isinstance(value, int) or math.isfinite(value)


def distribution(
    logits: Tensor, sampling: Sampling, prefixes: Sequence[Sequence[int]], suppressed: Sequence[Sequence[int]] = ()
) -> Tensor:
    """Probabilities of the next token.

    Args:
        logits: (n, V) float32, not changed.
        sampling: processors and temperature.
        prefixes: n token sequences, prompt included, each up to the position its logits predict from.
        suppressed: tokens that may not come next, per row (before ``min_new_tokens``); empty for none.

    Returns:
        (n, V) float32, rows sum to one; one-hot when greedy. A row in which every token is excluded is all zeros,
        and one whose logits are not all numbers is NaN.
    """
    logits = logits.clone()
    if sampling.reads_prefix:
        for row, prefix in enumerate(prefixes):
            _penalise(logits[row], sampling, prefix)
    for row, tokens in enumerate(suppressed):
        if tokens:
            logits[row, list(tokens)] = -math.inf
    logits.clamp_(max=LARGEST)
    top = logits.amax(-1, keepdim=True)
    if sampling.is_greedy:
        probs = torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    else:
        probs = torch.softmax(_truncate(_tempered(logits, top, sampling.temperature), sampling), -1)
    return probs.masked_fill_(top == -math.inf, 0.0).masked_fill_(top.isnan(), math.nan)


def _tempered(logits: Tensor, top: Tensor, temperature: float) -> Tensor:
    """Logits (n, V) divided by the temperature, up to a constant that is added to all of a row.

    ``top`` (n, 1) is the highest logit of each row. What is excluded stays at minus infinity.
    """
    scaled = logits / temperature
    is_in_range = (scaled.isfinite() | (scaled == logits)).all(-1, keepdim=True)
    if bool(is_in_range.all()):
        return scaled
    below = (logits.double() - top.double()) / temperature
    return torch.where(is_in_range, scaled, below.float())


def _penalise(logits: Tensor, sampling: Sampling, prefix: Sequence[int]) -> None:
    """Repetition penalty and forbidden n-grams on one row (V,), in place."""
    if sampling.repetition_penalty != 1.0 and prefix:
        seen = torch.tensor(sorted(set(prefix)), device=logits.device)
        score = logits[seen]
        penalty = min(max(sampling.repetition_penalty, PENALTIES[0]), PENALTIES[1])
        penalised = torch.where(score < 0, score * penalty, score / penalty)
        logits[seen] = torch.where(score.isinf(), score, penalised.clamp(-LARGEST, LARGEST))
    size = sampling.no_repeat_ngram_size
    if size and len(prefix) >= size:
        logits[_followers(prefix, tuple(prefix[len(prefix) - size + 1 :]))] = -math.inf


def _followers(prefix: Sequence[int], ending: tuple[int, ...]) -> list[int]:
    """What came after earlier occurrences of these tokens."""
    if not ending:
        return list(prefix)
    found, last = [], len(ending) - 1
    with suppress(ValueError):  # index() raises when no further place is found
        while True:
            last = prefix.index(ending[-1], last, len(prefix) - 1)
            if tuple(prefix[last - len(ending) + 1 : last + 1]) == ending:
                found.append(prefix[last + 1])
            last += 1
    return found


def _truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """top-k, top-p and min-p on (n, V); the likeliest token always stays."""
    vocab = logits.shape[-1]
    if 0 < sampling.top_k < vocab:
        smallest = logits.topk(sampling.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    if sampling.top_p < 1.0:
        ordered, places = logits.sort(-1, descending=True)
        probs = torch.softmax(ordered, -1)
        excluded = probs.cumsum(-1) - probs >= sampling.top_p
        excluded[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(excluded).scatter(1, places, excluded), -math.inf)
    if sampling.min_p > 0.0:
        probs = torch.softmax(logits, -1)
        logits = logits.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), -math.inf)
    return logits


def uniform(generator: torch.Generator) -> float:
    """One number in [0, 1)."""
    return float(torch.rand((), generator=generator, dtype=torch.float64))


def sample(probs: Tensor, generator: torch.Generator) -> int:
    """Draw one token from (V,) non-negative weights by inverting their cumulative sum.

    Never draws a token of weight zero.

    Raises:
        NoTokenError: no token has any weight.
        DecodingError: weights are not numbers.
    """
    cumulative = probs.double().cumsum(0)
    total = float(cumulative[-1])
    if total == 0.0:
        raise NoTokenError("no token may come next: every one is excluded")
    if not math.isfinite(total):
        raise DecodingError("the scores of the next token are not numbers; check the weights of the model")
    # the largest number drawn is 1 - 2^-53, so the product is less than the total and some token lies above it
    return int(torch.searchsorted(cumulative, total * uniform(generator), right=True))


def drawable(probs: Tensor) -> Tensor:
    """Distributions (n, V) that guesses can be drawn from.

    Rows without a distribution become point masses of token 0: a drafter has to guess something there, and
    verification, which asks for the same row, says what is wrong with it.
    """
    is_empty = ~(probs.sum(-1, keepdim=True) > 0)
    if not bool(is_empty.any()):
        return probs
    first = torch.zeros_like(probs)
    first[:, 0] = 1.0
    return torch.where(is_empty, first, probs)
