"""The key/value cache of a session: for each of its sequences a table of blocks, in which its entries are stored.

The caller gives the address of every entry (``length + node`` while drafting, the token's position once it is
committed; the same in every layer) instead of appending. Drafts that are built over several calls, trees, and keys and
values that are filled in later therefore need no other mechanism. Entry e of a slot is in its table's block
``e // size``, at place ``e % size``. A slot gets blocks as its text grows (``extend``, ``reserve``), from a store that
all sessions of a decoder share (``blocks.py``), and gives them back when it is released, or when the sliding window of
their layers has passed them.

Slots may have blocks in common: ``fork`` shares those of another slot, ``lend`` and ``adopt`` those of a prompt that
was read before. A block that others read is copied before somebody else than its writer writes to it; its writer goes
on behind what the others read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vivace.core.block_table import BlockTable
from vivace.core.blocks import SCALE, Account, BlockStore, LayerSpec, Unlimited, block_size
from vivace.core.low_rank import SlotAdapters
from vivace.core.pending import PendingKV
from vivace.errors import CapacityError
from vivace.kernels import fused
from vivace.units import format_bytes

if TYPE_CHECKING:
    from vivace.core.config import ModelConfig
    from vivace.core.step import Step

Blocks = tuple[tuple[int, ...], ...]
"""Numbers of blocks, pool by pool."""


def specs_of(config: ModelConfig, *, is_int8: bool = False) -> list[LayerSpec]:
    """Return what each layer of a model stores."""
    sizes = config.num_kv_heads, config.head_dim, config.head_dim
    return [LayerSpec(*sizes, config.window(layer), is_int8) for layer in range(config.num_layers)]


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return heads (..., D) in eight bits and their scales (..., 1): the largest number of a head becomes 127.

    A scale belongs to one entry, not to a block, so that what a draft wrote and was not kept leaves no trace in the
    entries beside it. Native kernels quantize to the same bits (``kernels/native/entries.h``).
    """
    wide = rows.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).to(SCALE)
    codes = (wide / scale.float()).round().clamp(-127, 127)
    return torch.where(scale == 0, 0, codes).to(torch.int8), scale


def slot_bytes(specs: Sequence[LayerSpec], entries: int, dtype: torch.dtype) -> int:
    """Return the bytes of the blocks that ``entries`` entries of a text take, in all layers together."""
    size = block_size(specs, dtype)
    return -(-entries // size) * size * sum(spec.entry_bytes(dtype) for spec in specs)


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
        store: BlockStore | None = None,
        account: Account | None = None,
    ) -> None:
        """Make empty tables, which take no blocks yet.

        Args:
            specs: sizes of every layer.
            num_slots: number of sequences.
            capacity: least number of entries of each slot; it is rounded up to whole blocks.
            row_count: calls on these sequences are padded to a multiple of this many rows (``Step.row_count``).
            dtype: dtype of keys and values.
            device: device of keys and values.
            store: where blocks are taken; None is a store of the cache's own.
            account: whose memory blocks are taken from; None has no limit.

        Raises:
            CapacityError: addresses or tables cannot be had; the message names the size.
        """
        size = block_size(specs, dtype) if store is None else store.size
        width = -(-capacity // size)
        if store is None:
            store = BlockStore(specs, dtype=dtype, device=device, least=num_slots * width, most=num_slots * width)
        self.store = store
        self.capacity = width * size
        """Number of entries of a slot."""
        self.num_slots = num_slots
        self.row_count = row_count
        self.account: Account = Unlimited() if account is None else account
        self.lengths = [0] * num_slots
        """Number of committed tokens of each slot."""
        self.prompts = [0] * num_slots
        """Prompt length of each slot; dynamic rotary embeddings rotate a prompt by its whole length."""
        self.pending = [PendingKV() for _ in range(num_slots)]
        """Per slot, tokens with missing entries; all others are complete in every layer."""
        with torch.inference_mode(False):
            self.pruned = torch.zeros((len(specs), num_slots), dtype=torch.int64)
        """(layers, slots) number of prompt tokens that a layer has no entries of (``prune``)."""
        self.has_pruned = False
        self.leads = [0] * num_slots
        """Number of entries in front of each slot's text that belong to no token (``begin_with``)."""
        self._lead_versions = [""] * num_slots
        self.beside: KVCache | None = None
        """Entries of the sources that the slots' texts have, where the model reads sources."""
        self.staged: set[int] = set()
        """Slots whose entries lie layer by layer on the ranks that run them (``parallel/staged.py``)."""
        self.adapters = SlotAdapters()
        """Low-rank deltas that the rows of each slot carry in every call."""
        self._writable = [(0, 0)] * num_slots
        """Stored entries of each slot that are known to be its own, first and one past the last, those in front of its
        text counted."""
        try:
            self.tables = [BlockTable(pool, num_slots, width) for pool in store.pools]
        except (MemoryError, RuntimeError) as exc:
            raise CapacityError(
                f"tables of {num_slots} x {capacity} entries need {format_bytes(8 * num_slots * width)}, "
                "which could not be allocated; lower the batch or max_new_tokens"
            ) from exc

    def __del__(self) -> None:
        """Give back what a session that was dropped has left."""
        if sys.is_finalizing():
            return
        for table in getattr(self, "tables", ()):
            for slot in range(self.num_slots):
                table.clear(slot)

    @property
    def device(self) -> torch.device:
        """Return the device of keys and values and of whatever is computed with them."""
        return self.store.device

    def slot_bytes(self, entries: int) -> int:
        """Return the bytes of the blocks that a text of so many entries takes."""
        return -(-entries // self.store.size) * self.store.block_bytes

    @property
    def most_bytes(self) -> int:
        """Return the bytes of the blocks that all slots take when they are full."""
        return self.num_slots * self.slot_bytes(self.capacity)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the blocks that slots have; one that several have counts for each."""
        return sum(table.pool.block_bytes * sum(map(bool, blocks)) for table in self.tables for blocks in table.blocks)

    # Blocks

    def set_aside(self, slot: int, entries: int) -> None:
        """Set neighbouring blocks aside for the entries that a slot may come to have, where there are some."""
        for table in self.tables:
            table.pool.forget(table.planned[slot])
            table.planned[slot] = table.pool.plan(-(-min(entries, self.capacity) // self.store.size))

    def extend(self, slots: Sequence[int], stops: Sequence[int]) -> None:
        """Give slots the blocks in which their entries from the committed ones to ``stop - 1`` are written.

        Raises:
            BusyError: there is no memory for them now; those that could be had stay with their slots.
        """
        for slot, stop in zip(slots, stops, strict=True):
            lead = self.leads[slot]
            assert stop + lead <= self.capacity, f"entry {stop + lead - 1} of a slot of {self.capacity}"
            self._own(slot, self.lengths[slot] + lead, stop + lead)

    def reserve(self, slots: Sequence[int], entries: Sequence[int]) -> None:
        """Let each slot's entry be written, which must lie within the slot.

        Raises:
            BusyError: there is no memory for it now.
        """
        for slot, entry in zip(slots, entries, strict=True):
            (first, stop), lead = self._writable[slot], self.leads[slot]
            if not first <= entry + lead < stop:
                assert entry + lead < self.capacity, f"entry {entry + lead} of a slot of {self.capacity}"
                self._own(slot, min(entry, self.lengths[slot]) + lead, entry + lead + 1)

    def _own(self, slot: int, first: int, stop: int) -> None:
        """Make stored entries first..stop-1 writable, with those in front of them that have no block yet."""
        size = self.store.size
        known, until = self._writable[slot]
        if known <= first and stop <= until:
            return
        for table in self.tables:
            blocks = table.blocks[slot]
            for place in range(first // size, min(-(-stop // size), len(blocks))):
                table.own(slot, max(first, place * size), self.account)
            while len(blocks) * size < stop:
                table.append(slot, self.account)
        self._writable[slot] = first, -(-stop // size) * size

    def reach(self, slot: int) -> int:
        """Return how many entries of a slot's text have blocks."""
        return min(len(table.blocks[slot]) for table in self.tables) * self.store.size - self.leads[slot]

    def lend(self, slot: int, first: int, stop: int) -> Blocks:
        """Hold the blocks of entries first..stop-1 of a slot for somebody who reads no entry from ``stop`` on."""
        size, lead = self.store.size, self.leads[slot]
        first, stop = first + lead, stop + lead
        self._writable[slot] = 0, 0
        lent = []
        for table in self.tables:
            blocks = table.blocks[slot][first // size : -(-stop // size)]
            table.pool.hold(blocks, (stop - 1) % size + 1)
            lent.append(tuple(blocks))
        return tuple(lent)

    def adopt(self, slot: int, first: int, stop: int, blocks: Blocks) -> None:
        """Let a slot have the blocks of entries first..stop-1 that somebody holds, beside those it has in front."""
        size, lead = self.store.size, self.leads[slot]
        first, stop = first + lead, stop + lead
        self._writable[slot] = 0, 0
        for table, own in zip(self.tables, blocks, strict=True):
            table.pool.hold(own, (stop - 1) % size + 1)
            for place, block in enumerate(own, first // size):
                table.share(slot, place, block)

    def fill(self, slot: int, first: int, stop: int, parts: Sequence[Sequence[Tensor]]) -> None:
        """Store and commit entries first..stop-1 of a slot, behind those it has, that were copied elsewhere.

        Args:
            slot: whose entries they are.
            first: number of tokens that are committed.
            stop: one past the last entry.
            parts: for each pool of blocks the last of these entries, as many as are there, as ``BlockPool.copies``
                gives them.

        Raises:
            BusyError: there is no memory for them now.
        """
        assert first == self.lengths[slot], "entries come one behind the other"
        self.extend([slot], [stop])
        size = self.store.size
        for table, own in zip(self.tables, parts, strict=True):
            start = stop - own[0].shape[-2]
            if start < stop:
                blocks = table.blocks[slot][start // size : -(-stop // size)]
                table.pool.paste(blocks, start % size, start % size + stop - start, own)
        self.commit([slot], [range(stop - first)])

    def clear(self, slot: int) -> None:
        """Let a slot begin again, with nothing stored."""
        for table in self.tables:
            table.clear(slot)
        self.lengths[slot] = 0
        self._writable[slot] = 0, 0

    def begin_with(self, slot: int, count: int, blocks: Blocks, version: str) -> None:
        """Let an empty slot begin with entries that belong to no token, such as those of a soft prompt.

        Its text is stored behind them: entry e of the text is entry e plus their number, in every layer. Whoever
        addresses entries goes on as if they were not there (``Step.in_layer``); every row reads them. Positions begin
        at the text. The blocks are shared until something is written behind the entries in the last of them.

        Args:
            slot: which has nothing yet.
            count: number of the entries.
            blocks: in which they lie, as ``lend`` gives them.
            version: what they are known by.
        """
        assert self.lengths[slot] == self.leads[slot] == 0, "a lead stands in front of everything else"
        self.adopt(slot, 0, count, blocks)
        self.prune(slot, [-count] * len(self.pruned))
        self.leads[slot], self._lead_versions[slot] = count, version

    def version(self, slot: int) -> str:
        """Return what tells the entries of a slot's text from those of the same text in others: its adapter, and what
        stands in front of it; empty for neither.
        """
        return self.adapters.version(slot) + self._lead_versions[slot]

    def prune(self, slot: int, pruned: Sequence[int]) -> None:
        """Say how many prompt tokens of a slot each layer has no entries of.

        They leave no gap: entry e of the text, behind the prompt, is entry e minus that number of the layer. Whoever
        addresses entries goes on as if all were there (``Step.in_layer``).
        """
        self.pruned[:, slot] = torch.tensor(pruned)
        self.has_pruned = bool(self.pruned.any())

    def spread(self, slot: int, layer: int, positions: Tensor) -> None:
        """Move the first entries of a slot in a layer, which lie one behind the other, to positions of its text.

        Args:
            slot: whose entries they are.
            layer: where.
            positions: (n,) of the first n entries, in rising order.
        """
        at, pool = torch.tensor(slot, device=self.device), self.store.place_of_layer[layer][0]
        source = self.addresses(pool, at, torch.arange(len(positions), device=self.device))
        target = self.addresses(pool, at, positions)
        for stored in self.store.stored(layer):
            stored.index_copy_(1, target, stored.index_select(1, source))

    def select(self, slot: int, layer: int, places: Tensor) -> None:
        """Keep some of a slot's entries in a layer, other ones in every head, one behind the other.

        Args:
            slot: whose entries they are.
            layer: where.
            places: (K, n) entries that each key head keeps, in rising order; they become its first n.
        """
        at, pool = torch.tensor(slot, device=self.device), self.store.place_of_layer[layer][0]
        source = self.addresses(pool, at, places)
        target = self.addresses(pool, at, torch.arange(places.shape[1], device=self.device))
        for stored in self.store.stored(layer):
            stored.index_copy_(1, target, stored.gather(1, source[..., None].expand(-1, -1, stored.shape[-1])))

    # Memory

    def put(self, layer: int, step: Step, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values (num_write, K, D) of the writing rows at ``step.entry``."""
        address = step.written(self.store.place_of_layer[layer][0])
        parts: tuple[Tensor, ...] = keys, values
        if self.is_int8(layer):
            (codes, key_scales), (more, value_scales) = quantise(keys), quantise(values)
            parts = codes, more, key_scales, value_scales
        elif fused.can_run(keys, values):
            fused.store(keys, values, address, *self.store.stored(layer))
            return
        for stored, rows in zip(self.store.stored(layer), parts, strict=True):
            stored.index_copy_(1, address, rows.transpose(0, 1))

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer in all blocks of the store, each (K, capacity of the pool, D)."""
        keys, values, *_ = self.store.stored(layer)
        return keys, values

    def is_int8(self, layer: int) -> bool:
        """Return whether a layer's keys and values are stored in eight bits."""
        return self.store.specs[layer].is_int8

    def scales(self, layer: int) -> tuple[int | None, int | None]:
        """Return the addresses of the scales of a layer's keys and values, where they are in eight bits."""
        _, _, *scales = self.store.stored(layer)
        return (scales[0].data_ptr(), scales[1].data_ptr()) if scales else (None, None)

    def at(self, layer: int, address: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer at places of the store, each (K, ..., D); of a slice they are views."""
        keys, values, *scales = (part[:, address] for part in self.store.stored(layer))
        if scales:
            keys, values = (
                (codes.float() * scale.float()).to(self.store.dtype)
                for codes, scale in zip((keys, values), scales, strict=True)
            )
        return keys, values

    def addresses(self, pool: int, slot: Tensor, entry: Tensor) -> Tensor:
        """Return where entries of slots are in a pool; both tensors broadcast to the shape of the result."""
        size = self.store.size
        return self.tables[pool].there[slot, entry // size] + entry % size

    def entries(self, layer: int, slot: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first entries of a slot, each (K, stop, D): views where they are contiguous."""
        pool = self.store.place_of_layer[layer][0]
        table = self.tables[pool]
        if stop <= table.straight[slot] * self.store.size:
            first = table.blocks[slot][0] * self.store.size if stop else 0
            return self.at(layer, slice(first, first + stop))
        return self.span(layer, slot, 0, stop)

    def span(self, layer: int, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return copies of keys and values of entries start..stop-1 of a slot, each (K, stop - start, D)."""
        places = torch.arange(start, stop, device=self.device)
        at = torch.tensor(slot, device=self.device)
        return self.at(layer, self.addresses(self.store.place_of_layer[layer][0], at, places))

    # SlotState

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Commit the given draft nodes of each slot, in the order of the path, and drop its other nodes."""
        for slot, path in zip(slots, paths, strict=True):
            length = self.lengths[slot]
            if any(node != place for place, node in enumerate(path)):
                self._move(slot, [length + node for node in path], length)
            self.lengths[slot] = stop = length + len(path)
            waiting = self.pending[slot].first
            for table in self.tables:
                if table.pool.window is not None:
                    table.let_go(slot, stop if waiting is None else min(stop, waiting))

    def _move(self, slot: int, kept: Sequence[int], length: int) -> None:
        """Store entries of a slot one behind the other from ``length`` on."""
        at = torch.tensor(slot, device=self.device)
        source = torch.tensor(kept, device=self.device)
        target = torch.arange(length, length + len(kept), device=self.device)
        places: dict[tuple[int, int], list[Tensor]] = {}
        for layer, ((pool, _), lacks) in enumerate(
            zip(self.store.place_of_layer, self.pruned[:, slot].tolist(), strict=True)
        ):
            if (pool, lacks) not in places:
                places[pool, lacks] = [self.addresses(pool, at, each - lacks) for each in (source, target)]
            for stored in self.store.stored(layer):
                stored.index_copy_(1, places[pool, lacks][1], stored.index_select(1, places[pool, lacks][0]))

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Drop the tokens of each slot from position ``length`` on."""
        for slot, length in zip(slots, lengths, strict=True):
            assert length <= self.lengths[slot], "truncate cannot grow a slot"
            self.lengths[slot] = length
            self._writable[slot] = 0, 0
            self.pending[slot].truncate(length)

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Let each target, which must be empty, begin with all that its source has; nothing is copied."""
        for source, target in zip(sources, targets, strict=True):
            assert not self.reach(target), "a fork begins in an empty slot"
            length = self.lengths[source]
            count = -(-length // self.store.size)
            if self.has_pruned and self.pruned[:, source].any():  # layers go on in the middle of what would be shared
                self._copy(source, target, length)
            elif length:
                self.adopt(target, 0, length, tuple(tuple(table.blocks[source][:count]) for table in self.tables))
            self._writable[source] = 0, 0
            self.lengths[target], self.prompts[target] = length, self.prompts[source]
            self.pending[target] = self.pending[source].copy()
        if self.beside is not None:
            self.beside.fork(sources, targets)

    def _copy(self, source: int, target: int, length: int) -> None:
        """Give an empty slot copies of all entries of another one."""
        self.leads[target], self._lead_versions[target] = self.leads[source], self._lead_versions[source]
        self.extend([target], [length])
        count = length + self.leads[source]
        for table in self.tables:
            table.pool.paste(table.blocks[target], 0, count, table.pool.copies(table.blocks[source], 0, count))
        self.prune(target, self.pruned[:, source].tolist())

    def release(self, slots: Sequence[int]) -> None:
        """Drop these sequences and give their blocks back."""
        for slot in slots:
            for table in self.tables:
                table.clear(slot)
            self.lengths[slot] = self.prompts[slot] = self.leads[slot] = 0
            self._lead_versions[slot] = ""
            self._writable[slot] = 0, 0
            self.pending[slot] = PendingKV()
            self.adapters.give(slot, None)
            if self.has_pruned:
                self.prune(slot, [0] * len(self.pruned))
        if self.beside is not None:
            self.beside.release(slots)

    def saved(self) -> object:
        """Return the lengths and pending entries of all slots; entries beyond a length are rewritten before a read."""
        pruned = self.pruned.clone() if self.has_pruned else None
        return self.lengths.copy(), [late.copy() for late in self.pending], pruned

    def restore(self, saved: object) -> None:
        """Drop everything that was stored since ``saved``."""
        assert isinstance(saved, tuple)
        self.lengths[:], self.pending[:], pruned = saved
        self.pruned.copy_(torch.zeros_like(self.pruned) if pruned is None else pruned)
        self.has_pruned = bool(self.pruned.any())
        self._writable = [(0, 0)] * self.num_slots


class Fresh:
    """A ``Memory`` that holds the keys and values of one dense call, with gradients, for training."""

    def __init__(self, beside: Fresh | None = None) -> None:
        """Start empty; ``beside`` holds what each layer reads of the sources of the call's texts, where it has such."""
        self.beside = beside
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
