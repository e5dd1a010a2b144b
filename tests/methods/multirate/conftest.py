"""Accelerators over the tiny decoders of the decoding tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vivace.core.model import Decoder
from vivace.methods.multirate.config import MultirateConfig
from vivace.methods.multirate.residual import Accelerator


@pytest.fixture
def accelerator(deep: Callable[[torch.dtype], Decoder]) -> Callable[..., Accelerator]:
    """An accelerator, untrained (``noise`` 0) or random."""

    def get(dtype: torch.dtype, noise: float = 0.0, **fields: object) -> Accelerator:
        torch.manual_seed(5)
        made = Accelerator(
            MultirateConfig(**{"exit_layer": 3, "rank": 4, "bottleneck": 8, **fields}), deep(dtype).config
        )
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter) * noise)
        return made.to(dtype).requires_grad_(False)

    return get
