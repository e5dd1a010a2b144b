"""The key/value cache: slots for sequences of different lengths, whose memory is allocated as it is written.

The caller gives the address of every entry (``length + node`` while drafting, the token's position once it is
committed; the same in every layer) instead of appending. Drafts that are built over several calls, trees, and keys and
values that are filled in later therefore need no other mechanism. The layout of a layer is ``(slots, K, capacity, D)``:
the entries of a head are contiguous, so attention reads them without a copy. Addresses of all slots are reserved at the
beginning; memory is allocated page by page (``pages.py``) and freed when a slot is released. How much a slot can need
is known before it is filled (``slot_bytes``), and a session counts it when it admits sequences (``decode/memory.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vivace.core.low_rank import SlotAdapters
from vivace.core.pages import Pages, items_to_a_page, whole_pages
from vivace.errors import CapacityError
from vivace.kernels.reference import KEY_BLOCK
from vivace.units import format_bytes

if TYPE_CHECKING:
    from vivace.core.config import ModelConfig
    from vivace.core.step import Step


@dataclass(frozen=True)
class LayerSpec:
    """Sizes of what one layer stores for an entry."""

    num_heads: int
    key_width: int
    value_width: int

    def num_bytes(self, entries: int, dtype: torch.dtype) -> int:
        """Return the bytes of ``entries`` entries of a slot; each head's keys, and its values, begin a page."""
        widths = (self.key_width, self.value_width)
        return sum(self.num_heads * whole_pages(entries * width * dtype.itemsize) for width in widths)


@dataclass(frozen=True, eq=False)
class PendingKV:
    """A committed token that exited early: its keys and values from ``layer`` on are pending (``decode/depth.py``)."""

    position: int
    """Position of the token in its text."""
    layer: int
    hidden: Tensor
    """(E,) residual that enters ``layer``."""


def specs_of(config: ModelConfig) -> list[LayerSpec]:
    """What each layer of a model stores."""
    return [LayerSpec(config.num_kv_heads, config.head_dim, config.head_dim)] * config.num_layers


def slot_bytes(specs: Sequence[LayerSpec], entries: int, dtype: torch.dtype) -> int:
    """Return the largest number of bytes that ``entries`` entries of a slot take, in all layers together."""
    return sum(spec.num_bytes(entries, dtype) for spec in specs)


class KVCache:
    """Keys and values of every layer for ``num_slots`` sequences of up to ``capacity`` entries.

    It implements ``Memory``, which a ``Step`` reads and writes, and ``SlotState``, through which a session commits and
    releases tokens. Entries beyond a slot's length may hold drafts or old numbers; no row may read them unless its step
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
        """Reserve addresses for all slots, without allocating memory.

        Args:
            specs: sizes of every layer.
            num_slots: number of sequences.
            capacity: least number of entries of each slot; it is rounded up to whole pages.
            row_count: calls on these sequences are padded to a multiple of this many rows (``Step.row_count``).
            dtype: dtype of keys and values.
            device: device of keys and values.

        Raises:
            CapacityError: the addresses cannot be reserved; the message names the size.
        """
        self._specs, self._dtype = tuple(specs), dtype
        items = {width * dtype.itemsize for spec in specs for width in (spec.key_width, spec.value_width)}
        block = lcm(KEY_BLOCK, *(items_to_a_page(item) for item in items))
        self.capacity = -(-capacity // block) * block
        """Number of entries of a slot, such that the entries of every head begin at a page."""
        self.num_slots = num_slots
        self.row_count = row_count
        self.lengths = [0] * num_slots
        """Number of committed tokens of each slot."""
        self.prompts = [0] * num_slots
        """Prompt length of each slot; dynamic rotary embeddings rotate a prompt by its whole length."""
        self.pending: list[list[PendingKV]] = [[] for _ in range(num_slots)]
        """Per slot, tokens with missing entries; all others are complete in every layer."""
        self.adapters = SlotAdapters()
        """Low-rank deltas that the rows of each slot carry in every call."""
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
        """Return the keys and values of a layer, from byte ``first`` of the pages on."""
        shapes = [(self.num_slots, spec.num_heads, self.capacity, w) for w in (spec.key_width, spec.value_width)]
        with torch.inference_mode(False):  # slots are also released outside the loop, by cancel
            if self._pages is None:
                keys, values = (torch.zeros(shape, dtype=self._dtype, device=device) for shape in shapes)
            else:
                keys = self._pages.tensor(first, shapes[0], self._dtype)
                values = self._pages.tensor(first + keys.nbytes, shapes[1], self._dtype)
        return keys, values

    @property
    def device(self) -> torch.device:
        """Where keys and values lie, and whatever is computed with them."""
        return self._keys[0].device

    def slot_bytes(self, entries: int) -> int:
        """Return the largest number of bytes that a slot takes once ``entries`` of its entries were written."""
        return slot_bytes(self._specs, entries, self._dtype)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all slots when they are full."""
        return sum(t.nbytes for t in (*self._keys, *self._values))

    # Memory

    def reserve(self, slots: Sequence[int], entries: Sequence[int]) -> None:
        """Record how far each slot will be written, so that ``release`` clears it; entries must lie within the slot."""
        for slot, entry in zip(slots, entries, strict=True):
            if entry >= self._written[slot]:
                assert entry < self.capacity, f"entry {entry} of a slot of {self.capacity}"
                self._written[slot] = entry + 1

    def put(self, layer: int, step: Step, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values (num_write, K, D) of the writing rows at ``step.entry``."""
        address = step.addresses(keys.shape[1], self.capacity)
        width = keys.shape[2]
        self._keys[layer].view(-1, width).index_copy_(0, address, keys.reshape(-1, width))
        width = values.shape[2]
        self._values[layer].view(-1, width).index_copy_(0, address, values.reshape(-1, width))

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, each (slots, K, capacity, D)."""
        return self._keys[layer], self._values[layer]

    def span(self, layer: int, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of entries start..stop-1 of a slot as views, each (K, stop - start, D)."""
        return self._keys[layer][slot, :, start:stop], self._values[layer][slot, :, start:stop]

    # SlotState

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Commit the given draft nodes of each slot, in the order of the path, and drop its other nodes."""
        for slot, path in zip(slots, paths, strict=True):
            length = self.lengths[slot]
            if any(node != place for place, node in enumerate(path)):
                kept = torch.tensor([length + node for node in path], device=self.device)
                for stored in (*self._keys, *self._values):
                    stored[slot, :, length : length + len(path)] = stored[slot].index_select(1, kept)
            self.lengths[slot] = length + len(path)

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Drop the tokens of each slot from position ``length`` on."""
        for slot, length in zip(slots, lengths, strict=True):
            assert length <= self.lengths[slot], "truncate cannot grow a slot"
            self.lengths[slot] = length
            self.pending[slot] = [late for late in self.pending[slot] if late.position < length]

    def release(self, slots: Sequence[int]) -> None:
        """Drop these sequences, free their memory and zero their entries.

        Stale entries must be zero, since attention multiplies masked entries by zero instead of skipping them.
        """
        for slot in slots:
            self._clear(slot, self._written[slot])
            self.lengths[slot] = self.prompts[slot] = self._written[slot] = 0
            self.pending[slot] = []
            self.adapters.give(slot, None)

    def _clear(self, slot: int, entries: int) -> None:
        """Zero the first entries of a slot, which frees their memory."""
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
        """Return the lengths and pending entries of all slots; entries beyond a length are rewritten before a read."""
        return self.lengths.copy(), [late.copy() for late in self.pending]

    def restore(self, saved: object) -> None:
        """Drop everything that was stored since ``saved``."""
        assert isinstance(saved, tuple)
        self.lengths[:], self.pending[:] = saved


class Fresh:
    """A ``Memory`` that holds the keys and values of one dense call, with gradients, for training."""

    def __init__(self) -> None:
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    def put(self, layer: int, step: Step, keys: Tensor, values: Tensor) -> None:
        """Keep the keys and values (T, K, D) of a dense call; a call that only reads changes nothing."""
        if step.num_write == 0:
            return
        assert step.grid is not None, "Fresh memory holds dense calls only"
        batch, length = step.grid
        self._stored[layer] = (
            keys.view(batch, length, *keys.shape[1:]).transpose(1, 2),
            values.view(batch, length, *values.shape[1:]).transpose(1, 2),
        )

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, each (B, K, T/B, D)."""
        return self._stored[layer]
