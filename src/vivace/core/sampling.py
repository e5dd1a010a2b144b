"""Turns logits into the distribution that the next token is drawn from, and draws from it.

Processors run in the order of Hugging Face's ``generate``: repetition penalty, forbidden n-grams,
suppressed tokens, temperature, top-k, top-p, min-p. They are given the prefix that a position would have, with the
draft tokens on its path, so that speculative decoding draws from exactly the distribution of plain decoding.

Every finite setting gives a distribution. Scores saturate at the largest float32 instead of overflowing. A row that
would leave the range of float32 when divided by its temperature is divided in float64 after its highest score was
subtracted, which does not change the distribution. Rows that stay in range have the same bits as without these rules.
Where every token is excluded there is no distribution: the row is all zeros, and drawing from it raises.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vivace.errors import ConfigError, DecodingError, NoTokenError

COMMON = 512
"""Number of tokens among which a nucleus is looked for first."""
LARGEST = torch.finfo(torch.float32).max
"""Score at which larger ones saturate."""
DRAWS = ("temperature", "top_p", "top_k", "min_p")
"""Settings that have no effect where the likeliest token is taken."""
PENALTIES = (2.0**-126, 2.0**126)
"""Repetition penalties beyond these change no score further: float32 has no normal numbers for them."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are drawn, with the argument names of Hugging Face."""

    do_sample: bool = False
    """Whether tokens are drawn at random; otherwise the likeliest token after penalties is taken."""
    temperature: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set whose probability reaches p (Holtzman et al. 2019, arXiv:1904.09751)."""
    min_p: float = 0.0
    """Keep the tokens that are at least this fraction as likely as the likeliest."""
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
        # an integer may have more digits than can be printed
        if isinstance(self.temperature, int) and self.temperature > sys.float_info.max:
            raise ConfigError(f"temperature must be at most {sys.float_info.max:.1e}")
        for name, value, holds, allowed in rules:
            if not (_is_finite(value) and holds):
                raise ConfigError(f"{name} must be {allowed}, found {value}")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, because of ``do_sample`` or a temperature of 0."""
        return not self.do_sample or self.temperature == 0

    @property
    def reads_prefix(self) -> bool:
        """Whether the distribution depends on earlier tokens in other ways than through the logits."""
        return self.repetition_penalty != 1.0 or self.no_repeat_ngram_size > 0

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is the argmax of the unprocessed logits."""
        return self.is_greedy and not self.reads_prefix


def _is_finite(value: float) -> bool:
    """Return whether a number is finite; integers are, even those that float64 cannot represent."""
    return isinstance(value, int) or math.isfinite(value)


def distribution(
    logits: Tensor, sampling: Sampling, prefixes: Sequence[Sequence[int]], suppressed: Sequence[Sequence[int]] = ()
) -> Tensor:
    """Return the probabilities of the next token.

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
            penalise(logits[row], sampling, prefix)
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
    """Return logits (n, V) divided by the temperature, up to a constant for each row.

    ``top`` (n, 1) is the highest logit of each row. Excluded tokens stay at minus infinity.
    """
    scaled = logits / temperature
    if bool(scaled.sum(-1).isfinite().all()):  # one pass that settles almost every case
        return scaled
    is_in_range = (scaled.isfinite() | (scaled == logits)).all(-1, keepdim=True)
    if bool(is_in_range.all()):
        return scaled
    below = (logits.double() - top.double()) / temperature
    return torch.where(is_in_range, scaled, below.float())


def penalise(logits: Tensor, sampling: Sampling, prefix: Sequence[int]) -> None:
    """Apply the repetition penalty and exclude forbidden n-grams on one row (V,), in place."""
    if sampling.repetition_penalty != 1.0 and prefix:
        seen = torch.tensor(sorted(set(prefix)), device=logits.device)
        score = logits[seen]
        penalty = min(max(sampling.repetition_penalty, PENALTIES[0]), PENALTIES[1])
        penalised = torch.where(score < 0, score * penalty, score / penalty)
        logits[seen] = torch.where(score.isinf(), score, penalised.clamp(-LARGEST, LARGEST))
    size = sampling.no_repeat_ngram_size
    if size and len(prefix) >= size:
        logits[_followers(prefix, tuple(prefix[len(prefix) - size + 1 :]))] = -math.inf


def bar_repeats(scores: Tensor, texts: Tensor, size: int) -> None:
    """Exclude every token that would repeat an n-gram of its text, in one pass over the windows of all texts.

    transformers counts the n-grams of each text in dictionaries of Python (``NoRepeatNGramLogitsProcessor``); the
    result is the same (FastSeq, Yan et al. 2021, arXiv:2106.04718, does it in one kernel).

    Args:
        scores: (n, V) of the next token, changed in place.
        texts: (n, T) tokens so far.
        size: n of the n-grams, at least 1.
    """
    ids = texts.cpu().numpy()
    windows = ids.shape[1] - size + 1
    if windows < 1:
        return
    is_repeat = np.ones((len(ids), windows), dtype=np.bool_)
    for place in range(size - 1):  # the windows' tokens at this place, against those at the end of the text
        is_repeat &= ids[:, place : place + windows] == ids[:, windows + place, None]
    found = np.flatnonzero(is_repeat)
    if not len(found):
        return
    rows, places = np.divmod(found, windows)
    barred = torch.from_numpy(np.stack((rows, ids[rows, places + size - 1]))).to(scores.device)
    scores[barred[0], barred[1]] = -math.inf


def _followers(prefix: Sequence[int], ending: tuple[int, ...]) -> list[int]:
    """Return the tokens that followed earlier occurrences of ``ending``."""
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
    """Exclude tokens by top-k, top-p and min-p, (n, V) -> (n, V); the likeliest token always remains."""
    vocab = logits.shape[-1]
    if 0 < sampling.top_k < vocab:
        smallest = logits.topk(sampling.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    if sampling.top_p < 1.0:
        logits = torch.cat([_nucleus(row, sampling.top_p) for row in logits.split(1)])
    if sampling.min_p > 0.0:
        probs = torch.softmax(logits, -1)
        logits = logits.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), -math.inf)
    return logits


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Exclude from one row (1, V) what lies beyond the smallest set whose probability reaches ``top_p``.

    The set is mostly small, so the likeliest ``COMMON`` tokens are ordered first, and all of them only where these do
    not reach it.
    """
    probs = torch.softmax(logits, -1)
    ordered, places = probs.topk(min(COMMON, logits.shape[-1]), -1)
    before = ordered.cumsum(-1) - ordered
    if not float(before[0, -1]) >= top_p:
        ordered, places = probs.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
    kept = places[0, : max(1, int((before < top_p).sum()))]
    return torch.full_like(logits, -math.inf).index_copy_(1, kept, logits[:, kept])


def uniform(generator: torch.Generator) -> float:
    """Draw one number from [0, 1)."""
    return float(torch.rand((), generator=generator, dtype=torch.float64))


def sample(probs: Tensor, generator: torch.Generator) -> int:
    """Draw one token from (V,) non-negative weights by inverting their cumulative sum.

    Never draws a token of weight zero.

    Raises:
        NoTokenError: every weight is zero.
        DecodingError: a weight is infinite or not a number.
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
    """Replace rows of zeros in (n, V) by point masses of token 0, so that guesses can be drawn from every row.

    A drafter has to guess something where every token is excluded; verification computes the same row and raises.
    """
    is_empty = ~(probs.sum(-1, keepdim=True) > 0)
    if not bool(is_empty.any()):
        return probs
    first = torch.zeros_like(probs)
    first[:, 0] = 1.0
    return torch.where(is_empty, first, probs)
