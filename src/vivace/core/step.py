"""The arguments of one call of the decoder besides the rows themselves: slots, positions, what is read and written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vivace.core.cache import Fresh, KVCache
from vivace.core.low_rank import LowRankDeltas
from vivace.core.rows import extent_of, indexed, runs_of, tree_of
from vivace.core.seams import Draft, Memory
from vivace.kernels.reference import KEY_BLOCK


@dataclass(frozen=True)
class Step:
    """One call of the decoder with T rows of any slots, packed.

    Rows 0..num_write-1 store keys and values; later rows only read what others stored (draft rows). Everything that a
    layer derives from these fields is cached here, so that it is computed once per call instead of once per layer.
    """

    memory: Memory
    slot: Tensor
    """(T,) slot whose entries the row reads."""
    position: Tensor
    """(T,) position of the row in its text, for rotary and learned positions and for windows."""
    entry: Tensor
    """(num_write,) entry of its slot at which a writing row is stored."""
    seen: Tensor
    """(T,) number of entries from the beginning of its slot that the row reads first."""
    tail: Tensor | None
    """(T, A) entries that the row reads after those, -1 padded: a tree node's path, itself included; or None."""
    num_write: int
    """Number of rows that store keys and values."""
    num_feed: int
    """Rows 0..num_feed-1 pass the feed-forward; later rows get only its "mlp" deltas."""
    deltas: tuple[LowRankDeltas, ...] = ()
    """What rows of this call carry beside their slots' adapters."""
    """Low-rank deltas that are added to projections of some rows."""
    extent: Tensor | None = None
    """(T,) length of the text when the row was written, for rotary embeddings that depend on it. None means
    position + 1; for longrope in a dense call it means the whole length."""
    grid: tuple[int, int] | None = None
    """(B, T/B) of a dense call, whose rows read the rows of their own batch element; None for other calls."""
    causal: bool = True
    """Whether rows of a dense call read only rows before them and themselves."""
    chunk: tuple[tuple[int, int, int], ...] | None = None
    """(slot, first row, one past the last) of each prompt chunk, where all rows are chunks and attend together."""
    row_count: int = 1
    """The call is padded to a multiple of this many rows, unless it is of prompt chunks. Kernels that give a row other
    bits in calls of other sizes (GPUs) give the same bits in calls of one size. A session sets it with its cache, so
    that it holds for all calls of its sequences and for no others."""
    index: Tensor | None = None
    """(slots, S) entries of each slot that its rows may read, in the order of their positions, and further ones that
    fill up whole key blocks. ``seen`` then counts in it, and there is no ``tail``. None where they may read all."""
    is_prompt: bool = False
    """Whether the rows are of prompts or whole texts, on whichever path, so that few of them decide a token."""
    longest: int | None = None
    """No row reads more entries than this; None asks ``seen``, for which a GPU waits."""
    slots: frozenset[int] | None = None
    """The slots of all rows; None asks ``slot``, for which a GPU waits."""
    last: int | None = None
    """No row has a position above this; None asks ``position``."""

    @staticmethod
    def of(draft: Draft, memory: KVCache, *, chunk: bool = False) -> Step:
        """Make the call for a draft: node i is stored at entry length + i in every layer.

        Args:
            draft: committed tokens and guesses.
            memory: the cache of its slots.
            chunk: whether the rows are prompt chunks (without guesses), whose attention runs over a chunk at once.
        """
        slots, nodes = draft.places.slot, draft.places.node
        lengths = memory.lengths
        entries = [lengths[s] + n for s, n in zip(slots, nodes, strict=True)]
        memory.reserve(slots, entries)
        entry = torch.tensor(entries, device=memory.device)
        if len(slots) == sum(draft.committed) or draft.is_chain:
            chunks = runs_of(slots) if chunk else None
            position, seen, tail = entry, entry + 1, None
            last = max(entries)
            longest = last + 1
        else:
            chunks = None
            position, seen, tail, last = tree_of(draft, [lengths[s] for s in slots])
            longest = max(lengths[s] for s in draft.slots) + tail.shape[1]
        count = len(slots)
        extent = extent_of(slots, [lengths[s] for s in slots], position, memory)
        return Step(
            memory,
            draft.slot,
            position,
            entry,
            seen,
            tail,
            count,
            count,
            extent=extent,
            chunk=chunks,
            row_count=memory.row_count,
            is_prompt=chunk or draft.is_prompt,
            longest=longest,
            slots=frozenset(draft.slots),
            last=last,
        )

    @staticmethod
    def at(
        memory: KVCache, slots: list[int], positions: list[int], *, readable: Mapping[int, Tensor] | None = None
    ) -> Step:
        """Make a call for rows at any positions of their texts, each stored at its position.

        Args:
            memory: the cache of the slots.
            slots: (T,) slot of each row.
            positions: (T,) position of each row, stored before or new.
            readable: by slot the positions that its rows may read up to their own, in rising order, their own among
                them; None for all.
        """
        memory.reserve(slots, positions)
        position = torch.tensor(positions, dtype=torch.int64, device=memory.device)
        slot = torch.tensor(slots, dtype=torch.int64, device=memory.device)
        seen, index = position + 1, None
        if readable is not None:
            seen, index = indexed(slot, position, readable, memory.num_slots)
        count = len(slots)
        extent = extent_of(slots, positions, position, memory)
        return Step(
            memory,
            slot,
            position,
            position,
            seen,
            None,
            count,
            count,
            extent=extent,
            row_count=memory.row_count,
            index=index,
            longest=max(positions) + 1 if index is None else None,
            slots=frozenset(slots),
            last=max(positions),
        )

    @staticmethod
    def packed(memory: KVCache, slots: list[int], positions: Tensor, entries: Tensor, *, chunk: bool = False) -> Step:
        """Make a call for rows of prompts of which some tokens are left out, each stored behind those that are not.

        Args:
            memory: the cache of the slots.
            slots: (T,) slot of each row.
            positions: (T,) position of each row in its text.
            entries: (T,) where it is stored; it reads all entries up to its own.
            chunk: whether rows of a slot attend together.
        """
        memory.reserve(slots, entries.tolist())
        count = len(slots)
        slot = torch.tensor(slots, dtype=torch.int64, device=memory.device)
        return Step(
            memory,
            slot,
            positions,
            entries,
            entries + 1,
            None,
            count,
            count,
            chunk=runs_of(slots) if chunk else None,
            row_count=memory.row_count,
            is_prompt=True,
        )

    @staticmethod
    def dense(
        batch: int,
        length: int,
        *,
        causal: bool = True,
        device: torch.device | None = None,
        memory: Fresh | None = None,
    ) -> Step:
        """Make the call of a whole batch without a cache, for training, encoders and scoring.

        Rows are packed by batch element: token t of element b is row b * length + t.

        Args:
            batch: number of batch elements, B.
            length: number of tokens of each, T/B.
            causal: a row reads the tokens up to its own; otherwise all tokens of its batch element.
            device: where the rows are made, the device of the model; None is the CPU.
            memory: holds the keys and values of the call; None makes one.
        """
        count = batch * length
        position = torch.arange(length, device=device).repeat(batch)
        slot = torch.arange(batch, device=device).repeat_interleave(length)
        return Step(
            Fresh() if memory is None else memory,
            slot,
            position,
            position,
            position + 1,
            None,
            count,
            count,
            grid=(batch, length),
            causal=causal,
            is_prompt=True,
            longest=length,
            last=length - 1,
        )

    def in_layer(self, layer: int) -> Step:
        """Return the call with entries as a layer has them, which may lack prompt tokens that others have."""
        memory = self.memory
        if not isinstance(memory, KVCache) or not memory.has_pruned:
            return self
        lacks = memory.pruned[layer].to(self.device)[self.slot]
        key = tuple(lacks.tolist())
        if key not in self._shifted:
            tail = None if self.tail is None else torch.where(self.tail < 0, self.tail, self.tail - lacks[:, None])
            entry = self.entry - lacks[: self.num_write]
            self._shifted[key] = (
                replace(self, entry=entry, seen=self.seen - lacks, tail=tail, longest=None) if any(key) else self
            )
        return self._shifted[key]

    @cached_property
    def _shifted(self) -> dict[tuple[int, ...], Step]:
        return {}

    @cached_property
    def low_rank(self) -> tuple[LowRankDeltas, ...]:
        """Everything that is added to projections of this call: the adapters of its rows' slots, and ``deltas``."""
        if not isinstance(self.memory, KVCache):
            return self.deltas
        return (*self.memory.adapters.deltas(self.slot), *self.deltas)

    @property
    def device(self) -> torch.device:
        """Return the device of the rows and of everything that is computed for them."""
        return self.slot.device

    @property
    def num_rows(self) -> int:
        """Return the number of rows, T."""
        return self.slot.shape[0]

    def take(self, rows: Tensor) -> Step:
        """Return the call for some of its writing rows, after others were pruned or exited early."""
        assert self.num_write == self.num_rows, "take rows before readers are added"
        tail = None if self.tail is None else self.tail[rows]
        extent = None if self.extent is None else self.extent[rows]
        return replace(
            self,
            slot=self.slot[rows],
            position=self.position[rows],
            entry=self.entry[rows],
            seen=self.seen[rows],
            tail=tail,
            extent=extent,
            num_write=len(rows),
            num_feed=len(rows),
            deltas=tuple(d.take(rows) for d in self.deltas),
            chunk=None,
            slots=self.slots if self.slots is not None and len(self.slots) == 1 else None,
        )

    def without_writing(self) -> Step:
        """Return the call with the same rows, none of which stores anything: what they read is stored already."""
        return replace(self, entry=self.entry[:0], num_write=0)

    def readers(self, of: Tensor, deltas: LowRankDeltas | None = None, *, fed: bool = True) -> Step:
        """Append rows that read what the rows ``of`` read and store nothing.

        Args:
            of: (n,) rows whose slots, positions and entries the new rows share.
            deltas: low-rank deltas of the whole new call (T + n rows), usually -1 on the writing rows.
            fed: whether the new rows pass the feed-forward; otherwise they get only its "mlp" deltas.
        """
        count = len(of)
        dense = None
        if self.grid is not None:
            assert count == self.num_rows, "a dense call takes readers of all its rows"
            dense = self.grid
        return replace(
            self,
            slot=torch.cat((self.slot, self.slot[of])),
            position=torch.cat((self.position, self.position[of])),
            seen=torch.cat((self.seen, self.seen[of])),
            tail=None if self.tail is None else torch.cat((self.tail, self.tail[of])),
            extent=None if self.extent is None else torch.cat((self.extent, self.extent[of])),
            num_feed=self.num_rows + count if fed else self.num_feed,
            deltas=self._extended(count, deltas),
            grid=dense,
            chunk=None,
        )

    def branched(self, count: int, deltas: LowRankDeltas | None = None) -> Step:
        """Append below every row a chain of ``count`` rows for this call only.

        The chains are stored after everything else that the call writes, at entries that are never committed. Each new
        row reads what the row above its chain reads, and its own chain up to itself.

        Args:
            count: number of rows of a chain, at the positions after the row above it.
            deltas: low-rank deltas of the whole new call (T + T * count rows), usually -1 on the rows that are there.
        """
        assert self.num_write == self.num_rows, "branch before readers are added"
        assert isinstance(self.memory, KVCache), "branches are stored in a cache"
        assert self.index is None, "the rows of a branch read all entries in front of it"
        slots, seen, entries = self.slot.tolist(), self.seen.tolist(), self.entry.tolist()
        tails = [[]] * len(slots) if self.tail is None else [[e for e in row if e >= 0] for row in self.tail.tolist()]
        free = {slot: entry + 1 for entry, slot in sorted(zip(entries, slots, strict=True))}
        paths: list[list[int]] = []
        stored: list[int] = []
        for slot, tail in zip(slots, tails, strict=True):
            own = list(range(free[slot], free[slot] + count))
            free[slot] += count
            stored += own
            paths += [tail + own[: place + 1] for place in range(count)]
        below = [row for row in range(len(slots)) for _ in range(count)]
        self.memory.reserve([slots[row] for row in below], stored)
        of = torch.tensor(below, device=self.device)
        ahead = torch.arange(1, count + 1, device=self.device).repeat(len(slots))
        paths = tails + paths
        longest = max(len(path) for path in paths)
        total = len(paths)
        return replace(
            self,
            slot=torch.cat((self.slot, self.slot[of])),
            position=torch.cat((self.position, self.position[of] + ahead)),
            entry=torch.tensor(entries + stored, device=self.device),
            seen=torch.tensor(seen + [seen[row] for row in below], device=self.device),
            tail=torch.tensor([path + [-1] * (longest - len(path)) for path in paths], device=self.device),
            num_write=total,
            num_feed=total,
            deltas=self._extended(total - len(slots), deltas),
            extent=None if self.extent is None else torch.cat((self.extent, self.extent[of])),
            chunk=None,
            longest=max(seen) + longest,
            last=None if self.last is None else self.last + count,
        )

    def _extended(self, count: int, deltas: LowRankDeltas | None) -> tuple[LowRankDeltas, ...]:
        """Return the deltas of the call with ``count`` further rows, and further deltas if there are any."""
        present = tuple(d.extended(count) for d in self.deltas)
        return present if deltas is None else (*present, deltas)

    def written(self, pool: int) -> Tensor:
        """Return where a pool of blocks stores what the writing rows have, (num_write,)."""
        if ("written", pool) not in self._addresses:
            assert isinstance(self.memory, KVCache)
            slot = self.slot[: self.num_write]
            self._addresses["written", pool] = self.memory.addresses(pool, slot, self.entry)
        return self._addresses["written", pool]

    def read(self, pool: int) -> Tensor:
        """Return where a pool of blocks has the entry that each row reads at each ordinal, (T, S)."""
        if ("read", pool) not in self._addresses:
            assert isinstance(self.memory, KVCache)
            entries = torch.arange(self.num_visible, device=self.device)[None] if self.order is None else self.order
            self._addresses["read", pool] = self.memory.addresses(pool, self.slot[:, None], entries)
        return self._addresses["read", pool]

    @cached_property
    def _addresses(self) -> dict[tuple[str, int], Tensor]:
        return {}

    def readable(self, layer: int, slot: int, count: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first entries that rows of a slot may read, each (K, count, D)."""
        assert isinstance(self.memory, KVCache)
        if self.index is None:
            return self.memory.entries(layer, slot, count)
        at = torch.tensor(slot, device=self.device)
        pool = self.memory.store.place_of_layer[layer][0]
        return self.memory.at(layer, self.memory.addresses(pool, at, self.index[slot, :count]))

    @cached_property
    def num_visible(self) -> int:
        """Largest number of entries that a row reads, rounded up to whole key blocks."""
        longest = self.longest
        if longest is None:
            longest = int(self.seen.max()) + (0 if self.tail is None else self.tail.shape[1])
        return -(-longest // KEY_BLOCK) * KEY_BLOCK

    @cached_property
    def single_slot(self) -> int | None:
        """The slot that all rows share, or None where they have several."""
        slots = frozenset(self.slot.tolist()) if self.slots is None else self.slots
        return next(iter(slots)) if len(slots) == 1 else None

    @cached_property
    def order(self) -> Tensor | None:
        """The entry that each row reads at each ordinal, (T, S), or None where entry equals ordinal.

        A tree node reads its ancestors in the order in which a chain would have stored them, so that its sums have the
        same bits as in plain decoding.
        """
        if self.index is not None:
            return self.index[self.slot, : self.num_visible]
        if self.tail is None:
            return None
        ordinals = torch.arange(self.num_visible, device=self.device).repeat(self.num_rows, 1)
        places = self.seen[:, None] + torch.arange(self.tail.shape[1], device=self.device)
        return ordinals.scatter(1, places, self.tail.clamp(min=0))

    def visible(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask over ordinals, (T, S): 0 where a row reads, -inf elsewhere."""
        cached = self._masks.get((window, dtype))
        if cached is None:
            reach = self.seen if self.tail is None else self.seen + (self.tail >= 0).sum(1)
            ordinal = torch.arange(self.num_visible, device=self.device)
            hidden = ordinal >= reach[:, None]
            if window is not None:
                hidden |= ordinal <= (reach - 1 - window)[:, None]
            cached = _additive(hidden, dtype)
            self._masks[window, dtype] = cached
        return cached

    def visible_in_chunk(
        self, first: int, stop: int, window: int | None, dtype: torch.dtype, *, is_plain: bool = True
    ) -> Tensor | None:
        """Return the additive mask (T', S') of one prompt chunk, or None where plain causal attention is the same."""
        key = (first, window, dtype)
        if key not in self._masks:
            last = self.seen[first:stop] - 1
            count, longest = stop - first, int(last[-1]) + 1
            ordinal = torch.arange(longest, device=self.device)
            hidden = ordinal > last[:, None]
            if window is not None:
                hidden |= ordinal <= (last - window)[:, None]
            plain = is_plain and longest == count and (window is None or window >= longest)
            self._masks[key] = None if plain else _additive(hidden, dtype)
        return self._masks[key]

    def visible_dense(self, window: int | None, dtype: torch.dtype, *, is_plain: bool = True) -> Tensor | None:
        """Return the additive mask (T/B, T/B) of a dense call, or None where plain causal attention is the same.

        Where rows read everything it is (1, 1), whatever they read: their own text, or their source.
        """
        assert self.grid is not None
        length = self.grid[1]
        if is_plain and self.causal and (window is None or window >= length):
            return None
        key = (-1, window, dtype)
        if key not in self._masks:
            place = torch.arange(length if self.causal or window is not None else 1, device=self.device)
            distance = place[:, None] - place
            hidden = distance < 0 if self.causal else torch.zeros_like(distance, dtype=torch.bool)
            if window is not None:
                hidden = hidden | (distance >= window)
            self._masks[key] = _additive(hidden, dtype)
        return self._masks[key]

    @cached_property
    def _masks(self) -> dict[tuple[object, ...], Tensor | None]:
        return {}

    @cached_property
    def rotations(self) -> dict[object, tuple[Tensor, Tensor]]:
        """Cosines and sines of this call by rotary embedding, filled by the layers."""
        return {}

    @cached_property
    def biases(self) -> dict[object, Tensor]:
        """Return a cache of what is added to scores by distance in this call; the tables of distances fill it."""
        return {}

    @cached_property
    def beside(self) -> Step:
        """The call in which these rows read the sources of their texts, each all of it."""
        if isinstance(self.memory, Fresh):
            assert self.memory.beside is not None, "the model reads sources"
            return replace(self, memory=self.memory.beside, causal=False, entry=self.entry[:0], num_write=0)
        assert isinstance(self.memory, KVCache)
        sources = self.memory.beside
        assert sources is not None, "the model reads sources"
        lengths = torch.tensor(sources.lengths, device=self.device)
        return Step(sources, self.slot, self.position, self.entry[:0], lengths[self.slot], None, 0, self.num_rows)

    @cached_property
    def laid_out(self) -> dict[object, Any]:
        """Structs of native calls for this call, by the span that made them, so that each is made once."""
        return {}


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to scores, -inf where ``hidden`` and 0 elsewhere."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)
