"""Streams over the tiny decoders of the decoding tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vivace.core.model import Decoder
from vivace.methods.multistream.config import MultistreamConfig
from vivace.methods.multistream.streams import Streams


@pytest.fixture
def streams(deep: Callable[[torch.dtype], Decoder]) -> Callable[..., Streams]:
    """Random streams."""

    def get(dtype: torch.dtype, noise: float = 0.1, **fields: object) -> Streams:
        torch.manual_seed(5)
        made = Streams(
            MultistreamConfig(**{"insertion_layer": 3, "rank": 4, "bottleneck": 8, **fields}), deep(dtype).config
        )
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter) * noise)
        return made.to(dtype).requires_grad_(False)

    return get
