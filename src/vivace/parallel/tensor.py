"""Tensor parallelism: every rank computes some heads and feed-forward columns of every layer (Shoeybi et al. 2019).

Queries, keys, values, gate and up are divided by rows, the attention's output and ``down`` by columns, after which the
products are summed (``core/summed.py``). All ranks hold the same residuals; the embedding, the final norm and the head
are on rank 0 alone, so that the others read nothing of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from vivace.checkpoint.load import Shard
from vivace.checkpoint.names import Range, Target
from vivace.core.config import ModelConfig
from vivace.core.layers import FeedForward, Linear
from vivace.core.parts import DenseParts
from vivace.core.seams import Stateful
from vivace.core.summed import Collective, SummedLinear, SummedNorm
from vivace.parallel.shares import Share


class ShareParts(DenseParts):
    """Makes the modules of one rank's share of a dense model."""

    def __init__(
        self,
        whole: ModelConfig,
        share: Share,
        collective: Collective,
        stateful: Sequence[Stateful] = (),
        *,
        has_ends: bool,
    ) -> None:
        """Make modules of a share.

        Args:
            whole: the model.
            share: which part of every layer it is.
            collective: sums what the ranks compute.
            stateful: who is told about sessions.
            has_ends: whether this rank has the head.
        """
        super().__init__(share.config(whole))
        self._whole = whole
        self._share = share
        self._collective = collective
        self._stateful = stateful
        self._has_ends = has_ends

    def projection(self, layer: int, site: str) -> nn.Module:
        """Make "qkv" with this rank's heads, or "o" with its columns."""
        c = self.config
        if site != "o":
            return super().projection(layer, site)
        return self._summed(c.num_heads * c.head_dim, layer, "o", bias=c.output_bias)

    def head_norm(self, layer: int, site: str) -> nn.Module:
        """Make the norm of each head, or this rank's part of a norm over all heads."""
        c, whole = self.config, self._whole
        if c.qk_norm != "full":
            return super().head_norm(layer, site)
        is_query = site == "q_norm"
        return SummedNorm(
            c.head_dim * (c.num_heads if is_query else c.num_kv_heads),
            c.head_dim * (whole.num_heads if is_query else whole.num_kv_heads),
            1 if is_query else self._share.num_holders,
            eps=c.norm_eps,
            offset=c.norm_offset,
            collective=self._collective,
            point=(layer, site),
        )

    def head(self) -> nn.Module | None:
        """Make the head on rank 0 if it is not tied to the embedding."""
        return super().head() if self._has_ends else None

    def stateful(self) -> Sequence[Stateful]:
        """Return who is told about sessions."""
        return self._stateful

    def _feed_forward(self, layer: int, width: int) -> FeedForward:
        c = self.config
        up = Linear(c.width, width * (2 if c.gated else 1), bias=c.ffn_bias)
        return FeedForward(c, layer, up, self._summed(width, layer, "down", bias=c.ffn_bias))

    def _summed(self, width: int, layer: int, site: str, *, bias: bool) -> SummedLinear:
        collective = self._collective
        return SummedLinear(width, self.config.width, bias=bias, collective=collective, point=(layer, site))


def shard_of(whole: ModelConfig, share: Share, *, has_ends: bool) -> Shard:
    """Return which part of every parameter a share consists of."""
    queries, keys = whole.num_heads * whole.head_dim, whole.num_kv_heads * whole.head_dim
    own_queries, own_keys = _times(share.heads, whole.head_dim), _times(share.kv_heads, whole.head_dim)
    qkv = (own_queries, _moved(own_keys, queries), _moved(own_keys, queries + keys))
    up = (share.columns, _moved(share.columns, whole.ffn_width)) if whole.gated else (share.columns,)
    rows: dict[str, tuple[Range, ...]] = {"qkv": qkv, "feed_forward.up": up}
    if whole.qk_norm == "full":
        rows |= {"q_norm": (own_queries,), "k_norm": (own_keys,)}
    columns = {"o.weight": own_queries, "feed_forward.down.weight": share.columns}

    def cut(name: str, target: Target) -> Target:
        _, _, leaf = name.removeprefix("layers.").partition(".")
        if not name.startswith("layers."):
            return target
        return replace(target, rows=rows.get(leaf.rpartition(".")[0]), columns=columns.get(leaf))

    return Shard(share.config(whole), cut, has_ends)


def _times(heads: Range, width: int) -> Range:
    return heads[0] * width, heads[1] * width


def _moved(rows: Range, by: int) -> Range:
    return rows[0] + by, rows[1] + by
