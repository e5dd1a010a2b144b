"""EL-attention to sources: all layers read the encoder's states themselves, which are stored once (Yan et al. 2021,
arXiv:2105.04779).

The projection to keys moves to the query, the projection to values behind the weighted sum. With the states h_j (E) of
a source, head i of a layer has, for its query q_i (D) and c the factor on scores,

    e_i = Wk_i^T q_i                         the expanded query, (E)
    p_ij = softmax_j(c e_i . h_j)
    z_i = sum_j p_ij h_j                     (E)
    o_i = Wv_i z_i + bv_i                    (D)

which is what attention over keys and values gives, but for rounding. For ``q_i . (Wk_i h_j + bk_i)`` is
``e_i . h_j + q_i . bk_i``, whose last term is the same for all j and cancels in the softmax; and bv_i comes out of the
sum because weights sum to one. Keys and values would be 2 L K D numbers for a token of the source; its state is E,
whatever the number of layers.

To a kernel this is attention with one key/value head of width E, whose values are its keys, so ``Attention`` runs it as
it is, on PyTorch and natively. We differ from the reference code (fastseq) in that the key bias is left out, states are
stored in one layout, and matrices of a checkpoint are cut without being changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from vivace.core.attention import Attention
from vivace.core.blocks import LayerSpec
from vivace.core.cache import KVCache
from vivace.core.config import ModelConfig
from vivace.core.cross import CrossAttention
from vivace.core.layers import Linear
from vivace.core.step import Step
from vivace.errors import UnsupportedError
from vivace.kernels import reference as kernels


class ElAttention(CrossAttention):
    """Reads the states of a source in the place of keys and values of its own."""

    def __init__(self, config: ModelConfig, q: nn.Module, kv: nn.Module, o: nn.Module, *, is_first: bool) -> None:
        """Put the projections together.

        Args:
            config: of the decoder.
            q: projection of rows to queries, (HD, E).
            kv: projection of states to keys and values, as in ``CrossAttention``; it is only ever cut into heads.
            o: projection of all heads to the residual, (E, HD).
            is_first: whether this is the layer that stores states, for itself and all others.
        """
        super().__init__(config, q, kv, o, Attention(reader_of(config), 0))
        self.is_first = is_first
        self.expansions = nn.ModuleList()
        """For each key head the matrix (E, D) of its query's expansion, once a backend has laid it out."""
        self.value_heads = nn.ModuleList()
        """The matrix (D, E) of its values, with their bias."""

    def store(self, states: Tensor, step: Step) -> None:
        """Store the states (S, E) of a source at the entries of ``step``, if this is the first layer."""
        if self.is_first:
            head = states[:, None]
            step.memory.put(0, step, head, head)

    def _read(self, q: Tensor, step: Step) -> Tensor:
        """Return what queries (T, H, D) read, (T, H, D), by way of heads of the encoder's width."""
        heads = range(self.config.num_kv_heads)
        groups = q.chunk(len(heads), 1)
        expanded = torch.cat([self._by_head(self._expand, head, groups[head]) for head in heads], 1)
        sums = self.attention(expanded, step).chunk(len(heads), 1)
        return torch.cat([self._by_head(self._values, head, sums[head]) for head in heads], 1)

    def _by_head(self, project: Callable[[int, Tensor], Tensor], head: int, x: Tensor) -> Tensor:
        """Project the queries that share a key head, (T, H/K, in) -> (T, H/K, out)."""
        y: Tensor = project(head, x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return y

    def _expand(self, head: int, q: Tensor) -> Tensor:
        if self.expansions:
            y: Tensor = self.expansions[head](q)
            return y
        return kernels.linear(q, self._cut(head)[0].t())

    def _values(self, head: int, z: Tensor) -> Tensor:
        if self.value_heads:
            y: Tensor = self.value_heads[head](z)
            return y
        return kernels.linear(z, *self._cut(head)[1:])

    def _cut(self, head: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the matrices of a head's keys and values, (D, E) each, and its value bias (D,), as views."""
        kv, c = self.kv, self.config
        assert isinstance(kv, Linear)
        shape = 2, c.num_kv_heads, c.head_dim
        keys, values = kv.weight.unflatten(0, shape)[:, head]
        return keys, values, None if kv.bias is None else kv.bias.view(shape)[1, head]

    def lay_out(self, projection: Callable[[Tensor, Tensor | None], nn.Module]) -> None:
        """Let a backend lay out the matrices of the heads; the projection that they were cut of is let go.

        Args:
            projection: as ``Backend.projection``.

        Raises:
            UnsupportedError: the matrix is stored in few bits.
        """
        if isinstance(self.kv, Linear) and self.kv.coded is not None:
            raise UnsupportedError(f"EL-attention cannot take this checkpoint: {ROUNDED}; give attention shared")
        for head in range(self.config.num_kv_heads):
            keys, values, bias = self._cut(head)
            self.expansions.append(projection(keys.t().contiguous(), None))
            self.value_heads.append(projection(values.contiguous(), None if bias is None else bias.clone()))
        self.kv = nn.Identity()


class StateCache(KVCache):
    """The states of the sources of some slots, one entry a token, which are the keys and the values of every layer."""

    def put(self, layer: int, step: Step, keys: Tensor, values: Tensor) -> None:
        """Store states (num_write, 1, E), once."""
        super().put(layer, step, keys, values[..., :0])

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the states in all blocks of the store, (1, capacity of the pool, E), twice."""
        states, _ = super().stored(layer)
        return states, states

    def at(self, layer: int, address: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return the states at places of the store, (1, ..., E), twice."""
        states, _ = super().at(layer, address)
        return states, states


def state_spec(config: ModelConfig) -> LayerSpec:
    """Return what a token of a source takes: one head of the encoder's width, and no values beside it."""
    assert config.encoder is not None
    return LayerSpec(1, config.encoder.width, 0)


def reader_of(config: ModelConfig) -> ModelConfig:
    """Return the sizes by which a layer's attention reads states."""
    assert config.encoder is not None
    plain = replace(config, windows=(), relative=None, positions="learned")
    return replace(plain, num_kv_heads=1, head_dim=config.encoder.width, attention_scale=config.scale)


ROUNDED = "matrices of keys are stored in few bits row by row, and it multiplies by their columns"


def why_no_states(c: ModelConfig) -> str | None:
    """Return why a model's layers cannot read states in the place of keys and values, or None where they can."""
    if c.encoder is None:
        what = "it has no encoder, whose output all layers would read"
        if c.positions == "rotary":
            return f"{what}, and keys of its own text are turned by their positions (rotary), which no query can undo"
        return what
    if c.qk_norm != "none" or c.qkv_clip is not None:
        return "its keys are normed or clamped between projection and product"
    if c.attention_softcap is not None:
        return "its scores are capped, so that a bias of keys does not cancel"
    return None
