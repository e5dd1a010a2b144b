"""The interface by which a decoder's modules are made, so that weights can be kept in other ways than in memory.

The default holds every weight in memory, with query, key and value fused into one matrix, and gate and up into another.
Streamed or sharded weights implement the same interface, ``Parts``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import nn

from vivace.core.attention import Attention
from vivace.core.config import ModelConfig
from vivace.core.cross import CrossAttention, Sources
from vivace.core.el_attention import ElAttention
from vivace.core.layers import FeedForward, Linear, RMSNorm
from vivace.core.moe import MixtureOfExperts
from vivace.core.seams import Stateful


class Parts(Protocol):
    """Makes the modules of a decoder."""

    def projection(self, layer: int, site: str) -> nn.Module:
        """Make the module at the site "qkv" or "o", which is called with ``(x)`` or ``(x, residual)``."""
        ...

    def head_norm(self, layer: int, site: str) -> nn.Module:
        """Make the norm "q_norm" of queries or "k_norm" of keys, where the model has them."""
        ...

    def attention(self, layer: int) -> Attention:
        """Make the module that reads the cache at a layer."""
        ...

    def feed_forward(self, layer: int) -> nn.Module:
        """Make the feed-forward of a layer, which is called with ``(x, step, residual)``."""
        ...

    def cross(self, layer: int) -> CrossAttention | None:
        """Make what reads a source at a layer, or return None where there is none."""
        ...

    def encoder(self) -> Parts | None:
        """Return what makes the modules of the encoder, or None where the model has none."""
        ...

    def head(self) -> nn.Module | None:
        """Make the head, or return None when it is the embedding's matrix."""
        ...

    def stateful(self) -> Sequence[Stateful]:
        """Return the parts with state for each sequence (windows of neurons); every session opens a state of each."""
        ...


class DenseParts:
    """Makes modules with all weights in memory, which the checkpoint loader fills."""

    def __init__(self, config: ModelConfig, sources: Sources = "shared") -> None:
        """Make modules of a model, whose layers read sources as ``sources`` says."""
        self.config = config
        self.sources = sources

    def projection(self, layer: int, site: str) -> nn.Module:
        """Make the fused projection "qkv" with ``(H + 2K) D`` outputs, or the projection "o"."""
        c = self.config
        heads = c.num_heads * c.head_dim
        if site == "qkv":
            return Linear(c.width, heads + 2 * c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        assert site == "o", site
        return Linear(heads, c.width, bias=c.output_bias)

    def head_norm(self, layer: int, site: str) -> nn.Module:
        """Make the norm of each head, or of all heads at once where the model has that."""
        c = self.config
        heads = c.num_heads if site == "q_norm" else c.num_kv_heads
        return RMSNorm(c.head_dim * (heads if c.qk_norm == "full" else 1), c.norm_eps, c.norm_offset)

    def attention(self, layer: int) -> Attention:
        """Make attention over the cache in its own precision."""
        return Attention(self.config, layer)

    def feed_forward(self, layer: int) -> nn.Module:
        """Make a feed-forward, or a mixture of experts where the layer has one."""
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

    def cross(self, layer: int) -> CrossAttention | None:
        """Make attention to the output of an encoder, or return None where the model has none."""
        c = self.config
        if c.encoder is None:
            return None
        heads, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        q = Linear(c.width, heads, bias=c.qkv_bias)
        kv = Linear(c.encoder.width, 2 * keys, bias=c.qkv_bias)
        o = Linear(heads, c.width, bias=c.output_bias)
        if self.sources == "el":
            return ElAttention(c, q, kv, o, is_first=layer == 0)
        return CrossAttention(c, q, kv, o, Attention(replace(c, windows=(), relative=None), layer))

    def encoder(self) -> Parts | None:
        """Return the same for the encoder, or None where the model has none."""
        return None if self.config.encoder is None else DenseParts(self.config.encoder)

    def head(self) -> nn.Module | None:
        """Make the head, or return None when it is tied to the embedding."""
        c = self.config
        return None if c.tied_head else Linear(c.width, c.vocab_size, bias=c.head_bias)

    def stateful(self) -> Sequence[Stateful]:
        """Return nothing, since weights in memory have no state."""
        return ()
