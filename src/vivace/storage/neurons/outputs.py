"""What a feed-forward loses by neurons that are left out, and the most that may be left out for a given loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.config import ModelConfig
from vivace.core.layers import FeedForward, Linear, activate
from vivace.core.model import Layer
from vivace.core.step import Step
from vivace.errors import ConfigError


class LayersInOrder(Protocol):
    """A decoder, all of it in memory or one layer after another."""

    @property
    def config(self) -> ModelConfig:
        """The architecture."""

    @property
    def layers(self) -> Iterable[nn.Module]:
        """The layers in order."""

    def embed(self, tokens: Tensor, step: Step) -> Tensor:
        """Return the embeddings of tokens, (T,) -> (T, E)."""


@torch.no_grad()
def feeds_of(
    model: LayersInOrder, *groups: Sequence[Sequence[int]]
) -> Iterator[tuple[FeedForward, tuple[Tensor, ...]]]:
    """Yield the feed-forward of each layer and its inputs on groups of texts, (tokens, E) each, layer after layer.

    Every layer is passed once, so that it need not stay in memory.

    Args:
        model: without mixtures of experts.
        groups: token ids of texts; a group without texts has no tokens.
    """
    steps = [[Step.dense(1, len(text)) for text in texts] for texts in groups]
    rows = [
        [model.embed(torch.tensor(text), step) for text, step in zip(texts, group, strict=True)]
        for texts, group in zip(groups, steps, strict=True)
    ]
    for layer in model.layers:
        assert isinstance(layer, Layer)
        assert isinstance(layer.feed_forward, FeedForward)
        after = [[layer.attend(h, s) for h, s in zip(*each, strict=True)] for each in zip(rows, steps, strict=True)]
        norm = layer.ffn_norm
        yield layer.feed_forward, tuple(torch.cat([h if norm is None else norm(h) for h in each]) for each in after)
        rows = [[layer.feed(h, s) for h, s in zip(*each, strict=True)] for each in zip(after, steps, strict=True)]


def gate_of(feed: FeedForward) -> tuple[Tensor, Tensor | None]:
    """Return weight (F, E) and bias (F,) of the map whose result the activation is applied to."""
    assert isinstance(feed.up, Linear)
    width = feed.up.weight.shape[0] // (2 if feed.gated else 1)
    return feed.up.weight[:width].detach(), None if feed.up.bias is None else feed.up.bias[:width].detach()


class NeuronOutputs:
    """What every neuron of a feed-forward adds to its output on some inputs."""

    @torch.no_grad()
    def __init__(self, feed: FeedForward, x: Tensor) -> None:
        """Compute the neurons of inputs (n, E)."""
        assert isinstance(feed.down, Linear)
        assert isinstance(feed.up, Linear)
        self.gate = activate(F.linear(x, *gate_of(feed)), feed.activation)
        """(n, F), after the activation."""
        self._down = feed.down.weight.detach()
        inner = self.gate
        if feed.gated:
            width = inner.shape[1]
            inner = inner * F.linear(x, feed.up.weight[width:], None if feed.up.bias is None else feed.up.bias[width:])
        self._inner = inner
        self._whole = F.linear(inner, self._down).float().norm(dim=-1).clamp_min(1e-12)

    @torch.no_grad()
    def error(self, left_out: Tensor) -> float:
        """Return the norm of the change of the output over the norm of the output, mean over inputs.

        Args:
            left_out: (n, F) bool, the neurons that are not computed.
        """
        change = F.linear(self._inner * left_out, self._down).float().norm(dim=-1)
        return float((change / self._whole).mean())


def check_error(error: float | None) -> None:
    """Refuse an error that cannot be allowed; None is where none is given.

    Raises:
        ConfigError: it is no share below 1.
    """
    if error is not None and not 0 <= error < 1:
        raise ConfigError(f"error is a share in [0, 1), found {error}")


def most_within(limit: float, count: int, error: Callable[[int], float]) -> int:
    """Return the largest of the numbers 0..count-1 whose error is within a limit, by halving; 0 where none is.

    Args:
        limit: largest error.
        count: at least 1.
        error: an error that rises with the number; where it does not quite, the number that is found still is within
            the limit, and the next one that was tried is not.
    """
    within, beyond = 0, count
    while beyond - within > 1:
        middle = (within + beyond) // 2
        if error(middle) <= limit:
            within = middle
        else:
            beyond = middle
    return within
