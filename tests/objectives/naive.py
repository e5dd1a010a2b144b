"""What training objectives are checked against: each loss of one position in float64, and a text's residuals.

Everything here takes one position or one text at a time, because it shall be read at a glance and not be fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.train.data import TokenBatch


def log_probs(logits: Tensor) -> list[float]:
    """Log-probabilities of one row of logits (V,)."""
    values = logits.double().tolist()
    total = math.log(sum(math.exp(value - max(values)) for value in values)) + max(values)
    return [value - total for value in values]


def cross_entropy(guess: Tensor, token: int) -> float:
    """``-log q(token)`` of guessed logits (V,)."""
    return -log_probs(guess)[token]


def divergence(truth: Tensor, guess: Tensor, temperature: float = 1.0) -> float:
    """``KL(p || q)`` of the law p of true logits (V,) and the law q of guessed ones, both softened."""
    p, q = log_probs(truth / temperature), log_probs(guess / temperature)
    return sum(math.exp(mine) * (mine - theirs) for mine, theirs in zip(p, q, strict=True))


def misalignment(one: Tensor, other: Tensor) -> float:
    """``1 - cos`` of two residuals (E,): 0 where they point the same way, 2 where they are opposed."""
    one, other = one.double(), other.double()
    return 1 - float(one @ other) / math.sqrt(float(one @ one) * float(other @ other))


def binary_cross_entropy(score: float, label: bool) -> float:
    """``-log sigmoid(score)`` where the label is true, of the opposite score where it is not."""
    return math.log1p(math.exp(-score if label else score))


def smooth_distance(guess: Tensor, truth: Tensor) -> float:
    """The smooth L1 distance of two rows (n,): the sum of d^2 / 2 below 1 and |d| - 1/2 above."""
    return sum(d * d / 2 if abs(d) < 1 else abs(d) - 0.5 for d in (guess.double() - truth.double()).tolist())


@torch.no_grad()
def residuals_of(model: Decoder, tokens: Tensor) -> tuple[list[Tensor], Step]:
    """Residuals (T, E) of one text below every layer and at the top, and the call that keeps its keys and values."""
    step = Step.dense(1, len(tokens))
    found = [model.embed(tokens, step)]
    for layer in range(model.config.num_layers):
        found.append(model.run(found[-1], step, layer, layer + 1))
    return found, step


def predicting(batch: TokenBatch) -> Iterator[tuple[int, int, int]]:
    """(text, position, next token) of every position whose next token is scored."""
    texts, length = batch.tokens.shape
    for text in range(texts):
        for position in range(length - 1):
            if batch.scored[text, position + 1]:
                yield text, position, int(batch.tokens[text, position + 1])
