"""FastKV (Jo et al. 2025, arXiv:2502.01068): tokens are propagated selectively behind one layer, and entries selected.

Two things are decoupled. Behind the propagation layer only those tokens go on that the last eight, the *window*, read
there with most weight, the mean over all heads. And in every layer each key head keeps entries of its own: those that
the window reads with most weight in the mean over the head's group of queries, the window's among them. Weights are
averaged over seven neighbouring tokens, as in SnapKV (arXiv:2404.14469), from which the selection of entries is taken.

A schedule is ``LAYER:SHARE:ENTRIES``: the last is the share of the prompt whose entries each head keeps in each layer;
left out, all are kept that passed the layer. The first token of the answer is written over what was kept, too, while
the paper selects entries behind it. Entries that are not kept are closed over; their memory is not given back
before the answer ends.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import torch
from torch import Tensor

from vivace.core.model import Layer
from vivace.prefill.pruned import Pruning
from vivace.prefill.scores import best, smoothed

WINDOW = 8
"""Tokens at the end of a prompt that say what is kept."""
NEIGHBOURS = 7


class FastKVPruning(Pruning):
    """Chooses tokens by what the window reads, and entries head by head."""

    def _choose(self, slot: int, part: int, below: Tensor, hidden: Tensor) -> Tensor:
        """Return the tokens that the window reads with most weight in the part's last layer, and keep its entries."""
        masses = self._watched(slot, part)
        count = self._counts(len(self._readings[slot].prompt))[part + 1]
        return best(smoothed(masses[-1].mean(0), NEIGHBOURS), count, WINDOW)

    def _finish(self, slot: int) -> None:
        """Let the last token read the part above, and say how much each layer lacks."""
        reading, points = self._readings[slot], self._schedule.points
        if points and points[0].entries is not None:
            part = len(self._spans) - 1
            self._pass_last(slot, part)
            self._readings[slot] = replace(reading, out=())
            self._watched(slot, part)
        super()._finish(slot)

    def _num_entries(self, length: int, count: int) -> int:
        """Return how many entries a head keeps where ``count`` tokens passed a layer, the last one's too."""
        [point] = self._schedule.points
        return count if point.entries is None else max(1, min(count, ceil(point.entries * length - 1e-9)))

    def _lacks(self, length: int) -> list[int]:
        """Return how many tokens of a prompt each layer has no entries of."""
        if not self._schedule.points:
            return super()._lacks(length)
        return [length - self._num_entries(length, length - lack) for lack in super()._lacks(length)]

    def _watched(self, slot: int, part: int) -> list[Tensor]:
        """Keep each head's entries in the layers of a part.

        Returns:
            What the window reads of n tokens, (K, n), the mean over its rows and a head's group: in the last layer, and
            in those below it where entries are selected.
        """
        reading, (start, stop), config = self._readings[slot], self._spans[part], self._model.config
        count = len(reading.positions)
        step, h = self._entering(slot, part, range(max(0, count - WINDOW), count))
        step = step.without_writing()
        entering = [h]
        self._model.run(h, step, start, stop, watch=lambda index, rows: entering.append(rows.clone()))
        kept = self._num_entries(len(reading.prompt), count)
        masses = []
        for index in range(start if kept < count else stop - 1, stop):
            layer = self._model.layers[index]
            assert isinstance(layer, Layer)
            total = torch.zeros((config.num_kv_heads, count), device=self._cache.device)
            for weights in layer.weigh(layer.query(entering[index - start], step), step):
                total[:, : weights.shape[1]] += weights.view(config.num_kv_heads, -1, weights.shape[1]).mean(1)
            masses.append(total / len(h))
            if kept < count:  # the last token's entry is written again when the answer begins
                places = torch.stack([best(smoothed(head, NEIGHBOURS), kept, WINDOW)[:-1] for head in masses[-1]])
                self._cache.select(slot, index, places)
        return masses
