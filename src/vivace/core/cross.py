"""Attention of a text to its source: what the encoder of an encoder-decoder model has made of another text.

A source is read once. Every layer of the decoder projects the encoder's output to keys and values of its own, which are
stored in a cache beside that of the text, by slot (``KVCache.beside``). From then on attention to a source is attention
of single rows to stored entries, like any other, only that all of them are read by all rows. So the beams of a search,
which are rows of one slot, share a source without a copy, and nothing is moved when beams change places
(FastSeq, Yan et al. 2021, arXiv:2106.04718). In ``el_attention.py`` the layers share what is stored, too.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from vivace.core.attention import Attention
from vivace.core.config import ModelConfig
from vivace.core.layers import make_norm
from vivace.core.step import Step

Sources = Literal["shared", "el"]
"""What is stored of a source: keys and values of each layer, which all beams share, or the encoder's states."""


class CrossAttention(nn.Module):
    """The part of a decoder's layer that reads the source of its text."""

    def __init__(self, config: ModelConfig, q: nn.Module, kv: nn.Module, o: nn.Module, attention: Attention) -> None:
        """Put the projections together; the norm is where the other halves of the layer have theirs."""
        super().__init__()
        self.config = config
        self.norm = make_norm(config) if config.norm_placement == "pre" else None
        self.sum_norm = make_norm(config) if config.norm_placement == "sum" else None
        self.q = q
        self.kv = kv
        """Projection of the encoder's output to keys and values side by side, (2KD, E)."""
        self.o = o
        self.attention = attention

    def store(self, states: Tensor, step: Step) -> None:
        """Store the keys and values of a source, the encoder's output (S, E), at the entries of ``step``."""
        c = self.config
        heads = self.kv(states).view(len(states), 2, c.num_kv_heads, c.head_dim)
        step.memory.put(self.attention.layer, step, heads[:, 0], heads[:, 1])

    def forward(self, h: Tensor, step: Step) -> Tensor:
        """Add what each row reads of its source, (T, E) -> (T, E)."""
        c = self.config
        x = h if self.norm is None else self.norm(h)
        q = self.q(x).view(len(h), c.num_heads, c.head_dim)
        y: Tensor = self.o(self._read(q, step.beside).reshape(len(h), -1), h)
        return y if self.sum_norm is None else self.sum_norm(y)

    def _read(self, q: Tensor, step: Step) -> Tensor:
        """Return the attention of queries to what is stored of their sources, (T, H, D) -> (T, H, D)."""
        return self.attention(q, step)
