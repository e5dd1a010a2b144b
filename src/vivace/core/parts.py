"""How a decoder is built, once: which modules stand at its projections.

The default holds every weight in memory, query/key/value and gate/up fused into one matrix each. Packed,
palettised, sharded or streamed weights fill the same ``Parts`` seam.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from vivace.core.attention import Attention
from vivace.core.config import ModelConfig
from vivace.core.layers import FeedForward, Linear
from vivace.core.moe import MixtureOfExperts
from vivace.core.seams import Stateful


class Parts(Protocol):
    """Makes the pieces of a decoder."""

    def projection(self, layer: int, site: str) -> nn.Module:
        """The module at "qkv" or "o": called as ``(x)`` and ``(x, residual)``."""
        ...

    def attention(self, layer: int) -> Attention:
        """Who reads the cache at this layer."""
        ...

    def feed_forward(self, layer: int) -> nn.Module:
        """The feed-forward half: called as ``(x, step, residual)``."""
        ...

    def head(self) -> nn.Module | None:
        """The LM head; None when it is the embedding's matrix."""
        ...

    def stateful(self) -> Sequence[Stateful]:
        """What remembers sequences among the parts (windows of neurons); every session opens a state of each."""
        ...


class DenseParts:
    """All weights resident, as allocated by torch; the checkpoint loader fills them."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def projection(self, layer: int, site: str) -> nn.Module:
        """Fused "qkv" of ``(H + 2K) D`` outputs, or "o"."""
        c = self.config
        heads = c.num_heads * c.head_dim
        if site == "qkv":
            return Linear(c.width, heads + 2 * c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        assert site == "o", site
        return Linear(heads, c.width, bias=c.output_bias)

    def attention(self, layer: int) -> Attention:
        """Attention over the cache as stored."""
        return Attention(self.config, layer)

    def feed_forward(self, layer: int) -> nn.Module:
        """A feed-forward, or a mixture of them."""
        c = self.config
        if not c.is_moe(layer):
            return self._feed_forward(layer, c.ffn_width)
        assert c.moe is not None
        experts = [self._feed_forward(layer, c.moe.expert_width) for _ in range(c.moe.num_experts)]
        return MixtureOfExperts(c.moe, Linear(c.width, c.moe.num_experts), experts)

    def _feed_forward(self, layer: int, width: int) -> FeedForward:
        c = self.config
        up = Linear(c.width, width * (2 if c.gated else 1), bias=c.ffn_bias)
        return FeedForward(c, layer, up, Linear(width, c.width, bias=c.ffn_bias))

    def head(self) -> nn.Module | None:
        """A matrix of its own, unless tied."""
        c = self.config
        return None if c.tied_head else Linear(c.width, c.vocab_size, bias=c.head_bias)

    def stateful(self) -> Sequence[Stateful]:
        """Weights in memory remember nothing."""
        return ()
