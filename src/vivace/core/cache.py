"""The key/value cache: slots of entries, ragged from the first day, that take memory as they are written.

An entry's address is given by the caller (``length + node`` while drafting, its position once committed,
the same in every layer), never "append": drafts built over several calls, trees and late fills need no
second mechanism. Layout per layer is ``(slots, K, capacity, D)``: a head's entries are contiguous, so
attention reads them without a copy. All slots have their addresses from the beginning, memory is taken page by page
(``pages.py``) and given back when a slot is released: what a slot may take is known before it is filled
(``slot_bytes``), and whoever admits sequences counts it (``decode/memory.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vivace.core.pages import Pages, items_to_a_page, whole_pages
from vivace.errors import CapacityError
from vivace.kernels.reference import KEY_BLOCK
from vivace.units import format_bytes

if TYPE_CHECKING:
    from vivace.core.step import Step


@dataclass(frozen=True)
class LayerSpec:
    """What one layer stores for an entry."""

    num_heads: int
    key_width: int
    value_width: int

    def num_bytes(self, entries: int, dtype: torch.dtype) -> int:
        """Memory that so many entries of a slot take: each head's keys, and its values, begin a page."""
        widths = (self.key_width, self.value_width)
        return sum(self.num_heads * whole_pages(entries * width * dtype.itemsize) for width in widths)


@dataclass(frozen=True, eq=False)
class PendingKV:
    """A committed token whose entries from ``layer`` on are still missing: it left early (``decode/depth.py``)."""

    position: int
    layer: int
    hidden: Tensor
    """(E,) residual entering ``layer``."""


def slot_bytes(specs: Sequence[LayerSpec], entries: int, dtype: torch.dtype) -> int:
    """Memory that so many entries of a slot take at most, in all layers together."""
    return sum(spec.num_bytes(entries, dtype) for spec in specs)


class KVCache:
    """Keys and values of every layer for ``num_slots`` sequences of up to ``capacity`` entries.

    Implements ``Memory`` (what a ``Step`` reads and writes) and ``SlotState`` (what the session tells).
    Entries beyond a slot's length may hold drafts or stale numbers; no row may read them unless its step
    names them.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        num_slots: int,
        capacity: int,
        *,
        row_count: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Take addresses for everything, and memory for nothing yet.

        Args:
            specs: of every layer.
            num_slots: sequences.
            capacity: entries of each.
            row_count: calls on these sequences are padded to a multiple of this many rows (``Step.row_count``).
            dtype: of keys and values.
            device: where they lie.

        Raises:
            CapacityError: the addresses cannot be had; the message names the size.
        """
        self._specs, self._dtype = tuple(specs), dtype
        items = {width * dtype.itemsize for spec in specs for width in (spec.key_width, spec.value_width)}
        block = lcm(KEY_BLOCK, *(items_to_a_page(item) for item in items))
        self.capacity = -(-capacity // block) * block
        """Entries of a slot; so many that each head's begin a page."""
        self.num_slots = num_slots
        self.row_count = row_count
        self.lengths = [0] * num_slots
        """Committed tokens per slot."""
        self.prompts = [0] * num_slots
        """Length of the prompt a slot was admitted with; a dynamic rotary embedding rotates the prompt as a whole."""
        self.pending: list[list[PendingKV]] = [[] for _ in range(num_slots)]
        """Per slot, tokens with missing entries; all others are complete in every layer."""
        self._written = [0] * num_slots
        sizes = [self.num_slots * spec.num_bytes(self.capacity, dtype) for spec in specs]
        self._pages: Pages | None = None
        try:
            if torch.device(device).type == "cpu":
                self._pages = Pages(sum(sizes))
            starts = [0, *accumulate(sizes)]
            stored = [self._allocate(spec, first, device) for spec, first in zip(specs, starts, strict=False)]
        except (MemoryError, RuntimeError) as exc:
            raise CapacityError(
                f"a cache of {num_slots} x {capacity} entries needs {format_bytes(sum(sizes))}, "
                "which could not be allocated; lower the batch or max_new_tokens"
            ) from exc
        self._keys, self._values = [keys for keys, _ in stored], [values for _, values in stored]

    def _allocate(self, spec: LayerSpec, first: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, from byte ``first`` of the pages on."""
        shapes = [(self.num_slots, spec.num_heads, self.capacity, w) for w in (spec.key_width, spec.value_width)]
        with torch.inference_mode(False):  # slots are also released outside the loop, by cancel
            if self._pages is None:
                keys, values = (torch.zeros(shape, dtype=self._dtype, device=device) for shape in shapes)
            else:
                keys = self._pages.tensor(first, shapes[0], self._dtype)
                values = self._pages.tensor(first + keys.nbytes, shapes[1], self._dtype)
        return keys, values

    def slot_bytes(self, entries: int) -> int:
        """Memory that a slot takes at most once so many of its entries were written."""
        return slot_bytes(self._specs, entries, self._dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots when they are full."""
        return sum(t.nbytes for t in (*self._keys, *self._values))

    # Memory

    def reserve(self, slots: Sequence[int], entries: Sequence[int]) -> None:
        """Note how far each slot is written; who writes beyond its end would write into a neighbour."""
        for slot, entry in zip(slots, entries, strict=True):
            if entry >= self._written[slot]:
                assert entry < self.capacity, f"entry {entry} of a slot of {self.capacity}"
                self._written[slot] = entry + 1

    def put(self, layer: int, step: Step, keys: Tensor, values: Tensor) -> None:
        """Store keys (num_write, K, D) and values of the writing rows at ``step.entry``."""
        address = step.addresses(keys.shape[1], self.capacity)
        width = keys.shape[2]
        self._keys[layer].view(-1, width).index_copy_(0, address, keys.reshape(-1, width))
        width = values.shape[2]
        self._values[layer].view(-1, width).index_copy_(0, address, values.reshape(-1, width))

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each (slots, K, capacity, D)."""
        return self._keys[layer], self._values[layer]

    def span(self, layer: int, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Entries start..stop-1 of a slot as views, each (K, stop - start, D): wire, disk, tests."""
        return self._keys[layer][slot, :, start:stop], self._values[layer][slot, :, start:stop]

    # SlotState

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep these draft nodes of each slot, in path order; forget its other nodes."""
        for slot, path in zip(slots, paths, strict=True):
            length = self.lengths[slot]
            if any(node != place for place, node in enumerate(path)):
                kept = torch.tensor([length + node for node in path], device=self._keys[0].device)
                for stored in (*self._keys, *self._values):
                    stored[slot, :, length : length + len(path)] = stored[slot].index_select(1, kept)
            self.lengths[slot] = length + len(path)

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Forget positions >= length."""
        for slot, length in zip(slots, lengths, strict=True):
            assert length <= self.lengths[slot], "truncate cannot grow a slot"
            self.lengths[slot] = length
            self.pending[slot] = [late for late in self.pending[slot] if late.position < length]

    def release(self, slots: Sequence[int]) -> None:
        """Forget these sequences, and give back what they left: hidden entries are multiplied by zero, not skipped."""
        for slot in slots:
            self._clear(slot, self._written[slot])
            self.lengths[slot] = self.prompts[slot] = self._written[slot] = 0
            self.pending[slot] = []

    def _clear(self, slot: int, entries: int) -> None:
        """Zero the first entries of a slot; they take no memory then."""
        if self._pages is None:
            for stored in (*self._keys, *self._values):
                stored[slot, :, :entries] = 0
            return
        base = self._keys[0].data_ptr()
        for stored in (*self._keys, *self._values):
            _, heads, capacity, width = stored.shape
            stride = capacity * width * stored.itemsize
            first = stored.data_ptr() - base + slot * heads * stride
            for head in range(heads):
                self._pages.clear(first + head * stride, entries * width * stored.itemsize)

    def saved(self) -> object:
        """How long every slot is and what it lacks; entries beyond a length are written again before they are read."""
        return self.lengths.copy(), [late.copy() for late in self.pending]

    def restore(self, saved: object) -> None:
        """Forget what was stored since."""
        assert isinstance(saved, tuple)
        self.lengths[:], self.pending[:] = saved


class Fresh:
    """Memory of one call: keys and values of this call's rows, with gradients (training)."""

    def __init__(self) -> None:
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    def put(self, layer: int, step: Step, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values (T, K, D) of a dense step; a call of readers alone leaves what is there."""
        if step.num_write == 0:
            return
        assert step.grid is not None, "Fresh memory holds dense calls only"
        batch, length = step.grid
        self._stored[layer] = (
            keys.view(batch, length, *keys.shape[1:]).transpose(1, 2),
            values.view(batch, length, *values.shape[1:]).transpose(1, 2),
        )

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each (B, K, T/B, D)."""
        return self._stored[layer]
