"""A decoder whose experts come from a cache: the same modules over slots of memory instead of weights of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vivace.core.config import ModelConfig
from vivace.core.layers import FeedForward, Linear
from vivace.core.moe import MixtureOfExperts
from vivace.core.parts import DenseParts
from vivace.storage.experts import ExpertCache


class CachedParts(DenseParts):
    """All weights resident but the experts."""

    def __init__(self, config: ModelConfig, cache: ExpertCache) -> None:
        super().__init__(config)
        self.cache = cache

    def feed_forward(self, layer: int) -> nn.Module:
        """A feed-forward, or a router over experts that the cache brings."""
        c = self.config
        if not c.is_moe(layer):
            return super().feed_forward(layer)
        assert c.moe is not None
        return MixtureOfExperts(c.moe, Linear(c.width, c.moe.num_experts), self.cache.layer(layer))


def bundle_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one expert: gate and up (2F, E), then down (E, F)."""
    assert config.moe is not None
    return 3 * config.moe.expert_width * config.width * dtype.itemsize


def expert_over(config: ModelConfig, memory: Tensor, dtype: torch.dtype) -> FeedForward:
    """The feed-forward whose weights are these bytes, (bundle_bytes,) uint8, wherever they come from."""
    assert config.moe is not None
    width = config.moe.expert_width
    with torch.device("meta"):
        up, down = Linear(config.width, 2 * width), Linear(width, config.width)
    numbers = memory.view(dtype)
    split = 2 * width * config.width
    up.weight = nn.Parameter(numbers[:split].view(2 * width, config.width), requires_grad=False)
    down.weight = nn.Parameter(numbers[split:].view(config.width, width), requires_grad=False)
    return FeedForward(config, 0, up, down)
