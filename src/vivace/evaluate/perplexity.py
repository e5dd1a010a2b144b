"""The perplexity of a text, read in windows that do not overlap; whatever has logits can be asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vivace.errors import ConfigError


class Scoring(Protocol):
    """What gives logits, such as an engine."""

    def logits(self, token_ids: Sequence[Sequence[int]]) -> Tensor:
        """Return the next-token logits at every position, (B, T) -> (B, T, V)."""
        ...


class Perplexity(NamedTuple):
    """The result."""

    value: float
    num_tokens: int
    """Number of tokens that were predicted: all but the first of each window."""


def windows_of(tokens: Sequence[int], window: int, limit: int | None = None) -> list[list[int]]:
    """Cut a text into whole windows of ``window`` tokens, at most ``limit`` of them.

    Raises:
        ConfigError: the text is shorter than one window.
    """
    count = len(tokens) // window
    if not count:
        raise ConfigError(f"the text has {len(tokens)} tokens, fewer than one window of {window}")
    return [
        list(tokens[at * window : (at + 1) * window]) for at in range(count if limit is None else min(count, limit))
    ]


def perplexity(engine: Scoring, windows: Sequence[Sequence[int]]) -> Perplexity:
    """Return the perplexity of windows of tokens, each of which is read alone."""
    total, count = 0.0, 0
    for window in windows:
        logs = engine.logits([window])[0, :-1].float().log_softmax(-1)
        found = logs.gather(1, torch.tensor(window[1:], device=logs.device)[:, None])
        total -= float(found.double().sum())
        count += len(window) - 1
    return Perplexity(math.exp(total / count), count)
