"""The cache that blocks replaced, as an oracle: every slot has the addresses of its whole capacity, and forks copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vivace.core.blocks import LayerSpec


class DenseCache:
    """Keys and values of every layer, (slots, K, capacity, D) each."""

    def __init__(self, specs: Sequence[LayerSpec], num_slots: int, capacity: int) -> None:
        self.lengths = [0] * num_slots
        self.layers = [
            [torch.zeros(num_slots, spec.num_heads, capacity, width) for width in (spec.key_width, spec.value_width)]
            for spec in specs
        ]

    def put(self, layer: int, slot: Tensor, entry: Tensor, rows: Sequence[Tensor]) -> None:
        """Store rows (T, K, D) of keys and of values at entries of slots."""
        for stored, part in zip(self.layers[layer], rows, strict=True):
            stored[slot, :, entry] = part

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep draft nodes."""
        for slot, path in zip(slots, paths, strict=True):
            length = self.lengths[slot]
            kept = torch.tensor([length + node for node in path], dtype=torch.int64)
            for stored in (part for layer in self.layers for part in layer):
                stored[slot, :, length : length + len(path)] = stored[slot].index_select(1, kept)
            self.lengths[slot] = length + len(path)

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Forget the ends of texts."""
        for slot, length in zip(slots, lengths, strict=True):
            self.lengths[slot] = length

    def fork(self, source: int, target: int, length: int) -> None:
        """Copy the beginning of a text."""
        for stored in (part for layer in self.layers for part in layer):
            stored[target, :, :length] = stored[source, :, :length]
        self.lengths[target] = length

    def release(self, slots: Sequence[int]) -> None:
        """Forget texts."""
        for slot in slots:
            self.lengths[slot] = 0

    def span(self, layer: int, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of entries of a slot, each (K, stop - start, D)."""
        keys, values = self.layers[layer]
        return keys[slot, :, start:stop], values[slot, :, start:stop]
