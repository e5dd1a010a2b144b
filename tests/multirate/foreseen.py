"""Small mixtures whose experts say what they were told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.parity.families import VOCAB
from vivace.core.model import Decoder
from vivace.core.moe import MixtureOfExperts
from vivace.core.seams import Batch
from vivace.multirate.foresight import Foresight, ForesightConfig

Heard = list[tuple[str, int, tuple[Any, ...]]]
"""What was said to whose experts: they ran, were expected, or were foretold."""


class Listener:
    """The experts of a layer, as they are, and what they were told."""

    def __init__(self, experts: object, heard: Heard, layer: int) -> None:
        self.experts, self.heard, self.layer = experts, heard, layer

    def serve(self, chosen: Sequence[int], num_rows: int) -> Iterator[tuple[int, object]]:
        self.heard.append(("ran", self.layer, tuple(chosen)))
        return self.experts.serve(chosen, num_rows)  # type: ignore[attr-defined, no-any-return]

    def expect(self, likely: Sequence[int]) -> None:
        self.heard.append(("expected", self.layer, tuple(likely)))

    def foretell(self, passes: Sequence[float]) -> None:
        self.heard.append(("foretold", self.layer, tuple(passes)))


def listening(model: Decoder, patch: pytest.MonkeyPatch) -> Heard:
    """What a model's experts hear from now on."""
    said: Heard = []
    for index, layer in enumerate(model.layers):
        if isinstance(layer.feed_forward, MixtureOfExperts):
            mixture = layer.feed_forward
            listener = Listener(mixture.experts, said, index)
            patch.delitem(mixture._modules, "experts")
            patch.setattr(mixture, "experts", listener, raising=False)
    return said


def foresight(model: Decoder, noise: float = 0.0, **fields: Any) -> Foresight:
    """Weights that were not trained."""
    torch.manual_seed(3)
    made = Foresight(ForesightConfig(**{"rank": 4, "bottleneck": 8, **fields}), model.config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return made


def batch(length: int = 24, count: int = 4) -> Batch:
    """Texts without a prompt."""
    tokens = torch.randint(1, VOCAB, (count, length), generator=torch.Generator().manual_seed(0))
    return Batch(tokens, torch.ones(count, length, dtype=torch.bool))
