"""SpecPrefill (Liu et al. 2025, arXiv:2502.02789), with the model's own lower layers for the draft model.

The lower layers read the prompt and then guess some tokens further, *lookahead*: after each, the residual behind these
layers goes through the head, and the token with the largest logit is read next. Every layer and head of them has then
read the prompt from behind its last token and from behind every guess. A token's importance is the largest of these
weights over layers and heads, averaged over the last token and the guesses; it is averaged over blocks of 32 tokens,
and the blocks with the largest means go on. Tokens keep their positions.

Where we differ: the paper's draft is another, smaller model, so its large model reads what was chosen from the first
layer. Here the draft's layers are the model's own, and what is chosen goes on behind them. The first four tokens and
the last 32 always go on, as for our own scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vivace.core.model import Layer
from vivace.core.step import Step
from vivace.prefill.pruned import Pruning
from vivace.prefill.scores import BLOCK, by_masses

LOOKAHEAD = 8
"""Tokens that are guessed; fewer where the model's positions end."""


class SpecPruning(Pruning):
    """Chooses blocks by what lower layers read while they guess."""

    def _choose(self, slot: int, part: int, below: Tensor, hidden: Tensor) -> Tensor:
        """Return the blocks that the last token and the guesses behind it read."""
        reading, stop = self._readings[slot], self._spans[part][1]
        length = len(hidden)
        importance = torch.zeros(length, device=self._cache.device)
        token = torch.tensor([reading.prompt[-1]], device=self._cache.device)
        places = range(length - 1, min(length + LOOKAHEAD, self._model.config.max_positions))
        for place in places:
            entry = torch.tensor([place], device=self._cache.device)
            step = Step.packed(self._cache, [slot], entry, entry)
            entering = [self._model.embed(token, step)]
            h = entering[0]
            for index in range(stop):
                h = self._model.run(h, step, index, index + 1)
                entering.append(h)
            largest = torch.zeros_like(importance)
            for index in range(stop):
                layer = self._model.layers[index]
                assert isinstance(layer, Layer)
                [weights] = layer.weigh(layer.query(entering[index], step), step)
                largest = torch.maximum(largest, weights[:, :length].amax(0))
            importance += largest
            token = self._model.head(h).argmax(-1)
        count = self._counts(len(reading.prompt))[part + 1]
        return by_masses(importance / len(places), count, BLOCK)
