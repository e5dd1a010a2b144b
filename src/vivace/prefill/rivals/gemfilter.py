"""GemFilter (Shi et al. 2024, arXiv:2409.17422): an early layer picks tokens, which are then read from the first layer.

All tokens pass the layers up to the filter layer. There the products of the last token's queries with every key are
summed over the heads, before the softmax, and averaged over five neighbouring tokens; the tokens with the largest
sums go on (their section 3.2). They then pass all layers as a prompt of their own, over what the first reading stored.

Where we differ: tokens keep the positions that they have in the text, as everywhere in this room; the paper numbers
them anew. The last token always goes on, since the answer begins behind it. Ties go to earlier tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vivace.core.model import Layer
from vivace.core.step import Step
from vivace.prefill.pruned import Pruning
from vivace.prefill.scores import best, smoothed

NEIGHBOURS = 5
"""Tokens over which products are averaged, half of them on each side."""


class GemFilterPruning(Pruning):
    """Chooses by unnormalised products with the last token's queries."""

    def _choose(self, slot: int, part: int, below: Tensor, hidden: Tensor) -> Tensor:
        """Return the tokens that match best, and the last one."""
        index, config = self._spans[part][1] - 1, self._model.config
        layer, last = self._model.layers[index], torch.tensor([len(hidden) - 1], device=self._cache.device)
        assert isinstance(layer, Layer)
        step = Step.packed(self._cache, [slot], self._readings[slot].positions[-1:], last)
        keys = step.readable(index, slot, len(hidden))[0].float()
        grouped = layer.query(below, step)[0].float().view(config.num_kv_heads, -1, config.head_dim)
        products = torch.einsum("kgd,ksd->s", grouped, keys)
        count = self._counts(len(self._readings[slot].prompt))[part + 1]
        return best(smoothed(products, NEIGHBOURS), count, 1)
