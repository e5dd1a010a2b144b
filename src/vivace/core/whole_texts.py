"""Calls over several whole texts of different lengths, as encoders read them: packed rows, attention text by text.

Projections and feed-forwards take the rows of all texts at once, so weights are read once for all of them, and nothing
is padded. Attention runs over each text by itself, with the shapes that it has alone. So a text has the same bits alone
and among sixteen.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from vivace.core.step import Step


class WholeTexts:
    """A ``Memory`` with the keys and values of one such call."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """Set the number of tokens of each text, in the order of their rows."""
        self.bounds = tuple(pairwise(accumulate(lengths, initial=0)))
        """First row of each text, and one past its last."""
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    def put(self, layer: int, step: Step, keys: Tensor, values: Tensor) -> None:
        """Keep the keys and values (T, K, D) of all rows."""
        self._stored[layer] = keys, values

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, each (T, K, D)."""
        return self._stored[layer]

    def step(self, device: torch.device) -> Step:
        """Return the call of all rows."""
        slot = torch.cat([torch.full((stop - first,), text) for text, (first, stop) in enumerate(self.bounds)])
        position = torch.cat([torch.arange(stop - first) for first, stop in self.bounds]).to(device)
        count, longest = len(position), max(stop - first for first, stop in self.bounds)
        given = (self, slot.to(device), position, position, position + 1, None, count, count)
        return Step(*given, causal=False, is_prompt=True, longest=longest, last=longest - 1)
