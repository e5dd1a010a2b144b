"""The low-rank weights that make a residual an accelerated one, the same for one gate and for several."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vivace.core.config import ModelConfig
from vivace.core.deltas import Deltas, Site


class AcceleratorTerms(nn.Module):
    """Query and output deltas and a silu bottleneck for each of the first layers; zero in effect until trained."""

    def __init__(self, model: ModelConfig, num_layers: int, rank: int, bottleneck: int) -> None:
        """Make adapters for layers 0..num_layers-1; rank 0 leaves the projections as they are."""
        super().__init__()
        heads = model.num_heads * model.head_dim
        shapes: dict[Site, tuple[int, int, int]] = {}
        for layer in range(num_layers):
            if rank:
                shapes[layer, "q"] = (model.width, rank, heads)
                shapes[layer, "o"] = (heads, rank, model.width)
            shapes[layer, "mlp"] = (model.width, bottleneck, model.width)
        self.down = nn.ParameterList(_kaiming(inner, wide) for wide, inner, _ in shapes.values())
        self.up = nn.ParameterList(nn.Parameter(torch.zeros(1, out, inner)) for _, inner, out in shapes.values())
        self._by_site = tuple(dict(zip(shapes, weights, strict=True)) for weights in (self.down, self.up))

    def terms(self, which: Tensor) -> Deltas:
        """The adapters as data for a call; ``which`` (T,) is 0 on accelerated rows and -1 elsewhere."""
        down, up = self._by_site
        return Deltas(which, down, up)

    def tensors(self) -> dict[str, Tensor]:
        """Named weights for a file."""
        return {name: value.detach() for name, value in self.state_dict().items()}


def _kaiming(inner: int, wide: int) -> nn.Parameter:
    weight = torch.empty(1, inner, wide)
    nn.init.kaiming_uniform_(weight[0], a=math.sqrt(5))
    return nn.Parameter(weight)
