"""Rows of a recorded step: a call whose every derived value is computed on the device, for all of its rows at once.

``Step`` asks the lists of Python what it can, and computes what layers derive from a call once for the call. A recorded
step makes many calls, of one row or two each; what they derive are views of what is computed here for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.low_rank import LowRankDeltas
from vivace.core.step import Step

if TYPE_CHECKING:
    from vivace.core.model import Decoder, Layer


class FixedRows:
    """T rows of n slots of a decoder, each stored at its position, reading entries from the beginning of its slot."""

    def __init__(
        self, decoder: Decoder, memory: KVCache, slot: Tensor, entry: Tensor, seen: Tensor, entries: int
    ) -> None:
        """Compute what layers derive.

        Args:
            decoder: whose layers they pass.
            memory: of the n slots.
            slot: (T,).
            entry: (T,) where each row is stored, which is its position; one behind the last position that the model
                knows stands at that one, and is never kept.
            seen: (T,) number of entries that each row reads.
            entries: number of entries that are read, visible or masked; the same for all rows.
        """
        position = entry.clamp(max=decoder.config.max_positions - 1)
        self._whole = Step(memory, slot, position, entry, seen, None, len(slot), len(slot), longest=entries)
        self._entries = entries
        _fix(self._whole, entries)
        pools = range(len(memory.store.pools))
        layers: Sequence[Layer] = list(decoder.layers)  # type: ignore[arg-type]
        of_slot = torch.arange(memory.num_slots, device=slot.device)[:, None]
        ordinal = torch.arange(entries, device=slot.device)
        self._written = {pool: memory.addresses(pool, slot, entry) for pool in pools}
        self._read = {pool: memory.addresses(pool, of_slot, ordinal) for pool in pools}
        if memory.num_slots > 1:
            self._read = {pool: address[slot] for pool, address in self._read.items()}
        windows = {layer.attention.window for layer in layers}
        self._masks = {(window, decoder.dtype): self._whole.visible(window, decoder.dtype) for window in windows}
        self._rotations: dict[object, tuple[Tensor, Tensor]] = {}
        for layer in layers:
            if layer.rotary is not None and (id(layer.rotary), decoder.dtype) not in self._rotations:
                self._rotations[id(layer.rotary), decoder.dtype] = _rotation(layer, position, decoder.dtype, entries)

    def call(self, rows: slice, *, writing: int, fed: int, deltas: tuple[LowRankDeltas, ...] = ()) -> Step:
        """Return the call of some rows.

        Args:
            rows: which.
            writing: the first so many of them store keys and values.
            fed: the first so many of them pass the feed-forward.
            deltas: what the rows carry.
        """
        whole = self._whole
        slot, position, entry, seen = (part[rows] for part in (whole.slot, whole.position, whole.entry, whole.seen))
        step = Step(whole.memory, slot, position, entry[:writing], seen, None, writing, fed, deltas)
        _fix(step, self._entries)
        for pool, address in self._written.items():
            step._addresses["written", pool] = address[rows][:writing]
            step._addresses["read", pool] = self._read[pool] if len(self._read[pool]) == 1 else self._read[pool][rows]
        step._masks.update({kind: mask[rows] for kind, mask in self._masks.items()})
        step.rotations.update({kind: (cos[rows], sin[rows]) for kind, (cos, sin) in self._rotations.items()})
        return step


def _fix(step: Step, entries: int) -> None:
    """Set what a call would ask numbers on the device for."""
    vars(step).update(num_visible=entries, single_slot=None, order=None)


def _rotation(layer: Layer, position: Tensor, dtype: torch.dtype, entries: int) -> tuple[Tensor, Tensor]:
    assert layer.rotary is not None
    return layer.rotary.at(position, None, dtype, last=entries - 1)
