"""Fixtures of the core tests: no gradients, every variant in both precisions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.core.decoders import VARIANTS, build
from vivace.core.model import Decoder


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=sorted(VARIANTS))
def decoder(request: pytest.FixtureRequest, dtype: torch.dtype) -> Decoder:
    return build(request.param, dtype)
