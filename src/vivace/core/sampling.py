"""From logits to the law a token is drawn from, and the drawing.

Processors run in the order of Hugging Face's ``generate``: repetition penalty, forbidden n-grams,
suppressed tokens, temperature, top-k, top-p, min-p. They see the prefix a position would have, drafted
tokens included, so a speculative decoder applies exactly the law plain decoding would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from vivace.errors import ConfigError


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
            if not (math.isfinite(value) and holds):
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


def law(
    logits: Tensor, sampling: Sampling, prefixes: Sequence[Sequence[int]], suppressed: Sequence[Sequence[int]] = ()
) -> Tensor:
    """Probabilities of the next token.

    Args:
        logits: (n, V) float32, not changed.
        sampling: processors and temperature.
        prefixes: n token sequences, prompt included, each up to the position its logits predict from.
        suppressed: tokens that may not come next, per row (before ``min_new_tokens``); empty for none.

    Returns:
        (n, V) float32, rows sum to one; one-hot when greedy.
    """
    logits = logits.clone()
    if sampling.reads_prefix:
        for row, prefix in enumerate(prefixes):
            _penalise(logits[row], sampling, prefix)
    for row, tokens in enumerate(suppressed):
        if tokens:
            logits[row, list(tokens)] = -math.inf
    if sampling.is_greedy:
        return torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    logits /= sampling.temperature
    return torch.softmax(_truncate(logits, sampling), -1)


def _penalise(logits: Tensor, sampling: Sampling, prefix: Sequence[int]) -> None:
    """Repetition penalty and forbidden n-grams on one row (V,), in place."""
    if sampling.repetition_penalty != 1.0 and prefix:
        seen = torch.tensor(sorted(set(prefix)), device=logits.device)
        score = logits[seen]
        logits[seen] = torch.where(score < 0, score * sampling.repetition_penalty, score / sampling.repetition_penalty)
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
    """
    cumulative = probs.double().cumsum(0)
    place = torch.searchsorted(cumulative, cumulative[-1] * uniform(generator), right=True)
    return int(place)
