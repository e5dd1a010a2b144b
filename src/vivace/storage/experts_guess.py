"""Guessing the next layers' experts from the slow residual (Eliseev and Mazur 2023, arXiv:2312.17238).

Before layer n runs, the router of layer n + ``ahead`` is asked about the residual as it stands. This is the rival of
the accelerated residual (``methods/foresight``): nothing to train, and little time to load.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.model import Decoder, Layer
from vivace.core.seams import Draft, TargetPass
from vivace.core.step import Step


class GuessingForwardPass:
    """All rows up the layers, telling each mixture beforehand what will likely be asked of it."""

    def __init__(self, count: int, ahead: int = 1) -> None:
        """Set how.

        Args:
            count: experts expected for each row.
            ahead: layers between the residual that is looked at and the router that is asked.
        """
        self.count = count
        self.ahead = ahead

    def run(self, model: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> TargetPass:
        """One pass for all slots; prompt chunks, which choose nearly all experts, are not guessed for."""
        step = Step.of(draft, cache, chunk=chunk)
        first = draft.entry_layer
        h = model.embed(draft.tokens, step) if draft.hidden is None else draft.hidden

        def guess(layer: int, rows: Tensor) -> None:
            if layer < len(model.layers) and model.config.is_moe(layer):
                above = model.layers[layer]
                assert isinstance(above, Layer)
                above.expect(rows, self.count)

        if step.is_prompt:
            h = model.run(h, step, first)
        else:
            for layer in range(first, first + self.ahead + 1):
                guess(layer, h)
            h = model.run(h, step, first, watch=lambda layer, rows: guess(layer + 1 + self.ahead, rows))
        return TargetPass(hidden=h, rows=torch.arange(len(draft.tokens)))
