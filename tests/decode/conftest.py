"""Fixtures of the decoding tests: precision, one thread, and decoders that are built once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from tests.decode.oracles import Text, plain_text
from tests.decode.tiny_decoders import build, prompts
from vivace.core.model import Decoder


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="session")
def models() -> Callable[..., Decoder]:
    """``build``, each decoder made once."""
    made: dict[object, Decoder] = {}

    def get(dtype: torch.dtype, **changes: object) -> Decoder:
        key = (dtype, *sorted(changes.items(), key=str))
        if key not in made:
            made[key] = build(dtype, **changes)  # type: ignore[arg-type]
        return made[key]

    return get


@pytest.fixture(scope="session")
def plain(models: Callable[..., Decoder]) -> Callable[..., list[Text]]:
    """What plain decoding makes of sixteen prompts, 28 tokens each, by precision."""

    @cache
    def get(dtype: torch.dtype) -> list[Text]:
        return [plain_text(models(dtype), prompt, 28) for prompt in prompts(16)]

    return get
