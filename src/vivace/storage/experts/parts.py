"""A decoder whose experts come from an expert cache: the same modules over slots instead of weights of their own."""

from __future__ import annotations

from torch import nn

from vivace.core.config import ModelConfig
from vivace.core.layers import Linear
from vivace.core.moe import MixtureOfExperts
from vivace.core.parts import DenseParts
from vivace.storage.experts.cache import ExpertCache
from vivace.storage.experts.layer import LayerExperts


class CachedParts(DenseParts):
    """Keeps all weights in memory but those of experts."""

    def __init__(self, config: ModelConfig, cache: ExpertCache) -> None:
        super().__init__(config)
        self.cache = cache

    def feed_forward(self, layer: int) -> nn.Module:
        """Return a dense feed-forward, or a router over the experts of the cache."""
        c = self.config
        if not c.is_moe(layer):
            return super().feed_forward(layer)
        assert c.moe is not None
        return MixtureOfExperts(c.moe, Linear(c.width, c.moe.num_experts), LayerExperts(self.cache, layer))
