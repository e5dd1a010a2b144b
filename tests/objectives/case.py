"""What the oracles of training objectives share: a batch, a frozen model, weights that do something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tests.decode.tiny_decoders import VOCAB, build
from tests.objectives.naive import predicting
from vivace.core.model import Decoder
from vivace.train.data import DecoderObjective, TokenBatch

LAYERS = 4
LENGTH = 11
M = TypeVar("M", bound=nn.Module)


class Case(NamedTuple):
    """An objective for a model, and what its loss is by a loop over positions."""

    model: Decoder
    objective: DecoderObjective
    oracle: Callable[[], float]
    beside: Mapping[str, float] = MappingProxyType({})
    """Terms that come with what carries the gradients on: their names in reports, and their weights."""


def text_batch() -> TokenBatch:
    """Three texts; their answers begin and end at different places."""
    tokens = torch.randint(1, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(4))
    place = torch.arange(LENGTH)
    starts, stops = torch.tensor([[3], [2], [5]]), torch.tensor([[LENGTH], [7], [LENGTH]])
    return TokenBatch(tokens, (place >= starts) & (place < stops))


BATCH = text_batch()
COUNT = sum(1 for _ in predicting(BATCH))


def trained(**changes: object) -> Decoder:
    """A decoder whose own weights are learnt."""
    return build(torch.float32, num_layers=LAYERS, seed=3, **changes)


def frozen(**changes: object) -> Decoder:
    """The same for those who learn beside it."""
    return trained(**changes).requires_grad_(False)


def disturbed(weights: M, noise: float = 0.1) -> M:
    """Weights that do something, the same in every run."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    return weights


def head(model: Decoder, row: Tensor) -> Tensor:
    """Logits (V,) of one residual (E,)."""
    return model.head(row[None])[0]


def learns(text: int, at: int) -> bool:
    """Whether the token that follows a position is one that is scored."""
    return at + 1 < LENGTH and bool(BATCH.scored[text, at + 1])
