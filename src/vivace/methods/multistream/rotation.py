"""Streams that differ by a rotation of their values instead of embeddings (arXiv:2402.11131, equation 7).

Stream j starts as M_t. The values it stores are rotated by an angle that grows with j, in pairs of a head's components:

    v_j <- v_j e^{i epsilon j}

This is the paper's variant without embeddings. Its angle is not known to us; ours spreads the streams over a quarter
turn. A rotated value is ``W x + (R - 1) W x``, so to the layers it is one more low-rank delta, whose rank is the width
of the values: kernels need no change. It is kept for comparison; it needs a copy of W, and embeddings cost less.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vivace.core.config import ModelConfig
from vivace.core.layers import Linear
from vivace.core.low_rank import LowRankDeltas, Site
from vivace.core.model import Decoder, Layer
from vivace.errors import UnsupportedError


class ValueRotation(nn.Module):
    """Copies of the value projections above the insertion layer, and the rotations of each stream's values."""

    values: Tensor
    """(layers, K * D, E)"""

    def __init__(self, insertion_layer: int, streams: int, model: ModelConfig) -> None:
        """Allocate the copies; ``read`` fills them.

        Raises:
            UnsupportedError: the values have a bias, which a delta in x cannot rotate.
        """
        super().__init__()
        if model.qkv_bias:
            raise UnsupportedError("values with a bias cannot be rotated; set adapter.identifier to embedding")
        self.insertion_layer = insertion_layer
        self.streams = streams
        self.head_dim = model.head_dim
        width = model.num_kv_heads * model.head_dim
        self.register_buffer("values", torch.zeros(model.num_layers - insertion_layer, width, model.width))

    @torch.no_grad()
    def read(self, model: Decoder) -> None:
        """Copy the value projections of a model with unquantized weights."""
        for layer, own in enumerate(self.values, self.insertion_layer):
            found = model.layers[layer]
            assert isinstance(found, Layer), "layers of ours"
            assert isinstance(found.qkv, Linear), "values are read off plain weights"
            own.copy_(found.qkv.weight[-len(own) :])

    def turns(self) -> Tensor:
        """Return R - 1 of every stream, (streams, K * D, K * D)."""
        heads, half = self.values.shape[1] // self.head_dim, self.head_dim // 2
        angle = torch.arange(1, self.streams + 1) * (math.pi / 2 / self.streams)
        cos, sin = (part[:, None, None] * torch.eye(half) for part in (angle.cos() - 1, angle.sin()))
        turn = torch.cat((torch.cat((cos, -sin), -1), torch.cat((sin, cos), -1)), 1)
        return torch.stack([torch.block_diag(*[one] * heads) for one in turn])

    def over(self, deltas: LowRankDeltas, count: int) -> LowRankDeltas:
        """Return the deltas of the streams with the rotation of their values added.

        Args:
            deltas: one adapter for all stream rows, whose streams stand in the order of their number, ``count`` per
                row.
            count: number of streams of a row.
        """
        which = deltas.which.clone()
        rows = (which >= 0).nonzero()[:, 0]
        which[rows] = torch.arange(len(rows), device=which.device) % count
        down: dict[Site, Tensor] = {site: part.expand(self.streams, -1, -1) for site, part in deltas.down.items()}
        up: dict[Site, Tensor] = {site: part.expand(self.streams, -1, -1) for site, part in deltas.up.items()}
        turns = self.turns().to(self.values)
        for layer, values in enumerate(self.values, self.insertion_layer):
            site = layer, "v"
            own = values.expand(self.streams, -1, -1)
            down[site] = torch.cat((down[site], own.to(down[site].dtype)), 1) if site in down else own
            up[site] = torch.cat((up[site], turns.to(up[site].dtype)), 2) if site in up else turns
        down, up = ({site: part.contiguous() for site, part in parts.items()} for parts in (down, up))
        return LowRankDeltas(which, down, up)
