"""The key/value cache: slots of preallocated entries, ragged from the first day.

An entry's address is given by the caller (``length + node`` while drafting, its position once committed,
the same in every layer), never "append": drafts built over several calls, trees and late fills need no
second mechanism. Layout per layer is ``(slots, K, capacity, D)``: a head's entries are contiguous, so
attention reads them without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vivace.errors import CapacityError, UnsupportedError
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


@dataclass(frozen=True, eq=False)
class Late:
    """A committed token whose entries from ``layer`` on are still missing: it left early (``decode/depth.py``)."""

    position: int
    layer: int
    hidden: Tensor
    """(E,) residual entering ``layer``."""


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
        """Allocate everything now.

        Args:
            specs: of every layer.
            num_slots: sequences.
            capacity: entries of each.
            row_count: calls on these sequences are padded to a multiple of this many rows (``Step.row_count``).
            dtype: of keys and values.
            device: where they lie.

        Raises:
            CapacityError: the memory cannot be had; the message names the size.
        """
        self.capacity = -(-capacity // KEY_BLOCK) * KEY_BLOCK
        self.num_slots = num_slots
        self.row_count = row_count
        self.lengths = [0] * num_slots
        """Committed tokens per slot."""
        self.prompts = [0] * num_slots
        """Length of the prompt a slot was admitted with; a dynamic rotary embedding rotates the prompt as a whole."""
        self.late: list[list[Late]] = [[] for _ in range(num_slots)]
        """Per slot, tokens with missing entries; all others are complete in every layer."""
        self._written = [0] * num_slots
        try:
            self._keys = [self._allocate(s.num_heads, s.key_width, dtype, device) for s in specs]
            self._values = [self._allocate(s.num_heads, s.value_width, dtype, device) for s in specs]
        except RuntimeError as exc:
            per_entry = sum(s.num_heads * (s.key_width + s.value_width) for s in specs) * dtype.itemsize
            raise CapacityError(
                f"a cache of {num_slots} x {capacity} entries needs {format_bytes(num_slots * capacity * per_entry)}, "
                "which could not be allocated; lower the batch or max_new_tokens"
            ) from exc

    def _allocate(self, heads: int, width: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        with torch.inference_mode(False):  # slots are also released outside the loop, by cancel
            return torch.zeros(self.num_slots, heads, self.capacity, width, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
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
            self.late[slot] = [late for late in self.late[slot] if late.position < length]

    def fork(self, sources: Sequence[int], targets: Sequence[int], length: int | None = None) -> None:
        """Parallel assignment of slots: beams, several samples of a prompt, shared prefixes."""
        lengths = [self.lengths[s] if length is None else min(length, self.lengths[s]) for s in sources]
        longest = max(lengths, default=0)
        source = torch.tensor(list(sources), device=self._keys[0].device)
        target = torch.tensor(list(targets), device=self._keys[0].device)
        for stored in (*self._keys, *self._values):
            stored[target, :, :longest] = stored[source, :, :longest]
        written, prompts, late = self._written.copy(), self.prompts.copy(), self.late.copy()
        for slot, origin, kept in zip(targets, sources, lengths, strict=True):
            self.lengths[slot] = kept
            self._written[slot] = max(written[slot], longest)
            self.prompts[slot] = prompts[origin]
            self.late[slot] = [missing for missing in late[origin] if missing.position < kept]

    def release(self, slots: Sequence[int]) -> None:
        """Forget these sequences, and clear what they left: hidden entries are multiplied by zero, not skipped."""
        for slot in slots:
            for stored in (*self._keys, *self._values):
                stored[slot, :, : self._written[slot]] = 0
            self.lengths[slot] = self.prompts[slot] = self._written[slot] = 0
            self.late[slot] = []

    def settle(self, slots: Sequence[int]) -> None:
        """Nothing to do, unless tokens left early.

        Raises:
            UnsupportedError: a slot lacks entries; who let its tokens leave can fill them (``Depth.settle``).
        """
        for slot in slots:
            if self.late[slot]:
                first = min(self.late[slot], key=lambda late: late.position)
                raise UnsupportedError(
                    f"slot {slot} lacks {len(self.late[slot])} entries, the first at position {first.position} from "
                    f"layer {first.layer} on; settle the method that left early first"
                )


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
