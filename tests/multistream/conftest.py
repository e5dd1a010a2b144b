"""Streams over the tiny decoders of the decoding tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.decode.tiny_decoders import build
from vivace.core.model import Decoder
from vivace.multistream.config import MultistreamConfig
from vivace.multistream.streams import Streams


@pytest.fixture(autouse=True, scope="package")
def single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def deep() -> Callable[[torch.dtype], Decoder]:
    """A decoder of six layers, by precision."""
    made: dict[torch.dtype, Decoder] = {}

    def get(dtype: torch.dtype) -> Decoder:
        if dtype not in made:
            with torch.inference_mode(False):  # tests that train get it too, whoever asks first
                made[dtype] = build(dtype, num_layers=6, seed=3).requires_grad_(False)
        return made[dtype]

    return get


@pytest.fixture
def streams(deep: Callable[[torch.dtype], Decoder]) -> Callable[..., Streams]:
    """Random streams."""

    def get(dtype: torch.dtype, noise: float = 0.1, **fields: object) -> Streams:
        torch.manual_seed(5)
        made = Streams(MultistreamConfig(**{"insertion": 3, "rank": 4, "bottleneck": 8, **fields}), deep(dtype).config)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter) * noise)
        return made.to(dtype).requires_grad_(False)

    return get
