"""Blocks of keys and values: what texts take memory in, share, and give back.

A block has the entries of a fixed number of neighbouring positions, in every layer of its pool. Each text has a table
of its blocks (``cache.py``); several texts may have the same block in their tables. A pool counts how many hold each
block and takes its memory back with the last one. Addresses of all blocks are reserved at the beginning, so nothing is
ever moved; memory is allocated page by page as entries are written (``pages.py``).

In a layer, the entries of one head lie side by side over all blocks, ``(K, blocks * size, D)``. Blocks with
neighbouring numbers are therefore contiguous, and a text that has such blocks is read without a copy; a pool gives a
text neighbouring blocks where it can.

Block 0 is never given away and stays zero. Tables point to it where they have nothing, so that a kernel that multiplies
entries nobody reads by zero finds numbers there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm, prod
from typing import Protocol

import torch
from torch import Tensor

from vivace.core.pages import PAGE, Pages, items_to_a_page, whole_pages
from vivace.errors import BusyError, CapacityError
from vivace.kernels.reference import KEY_BLOCK
from vivace.units import format_bytes

_FREE, _TAKEN, _PLANNED = 0, 1, 2
SCALE = torch.bfloat16
"""Dtype of the scales of entries in eight bits."""
WIDEST_INT8 = 256
"""Widest head that native kernels read in eight bits (``MAX_TILED`` in kernels/native/attention.h)."""
WARM_BYTES = 16 << 20
"""How much of what a pool was given back it keeps allocated: new pages take longer than reading a short prompt."""
FIRST_BYTES = 64 << 20
"""What a pool takes at once where it cannot grow in place: on all devices but a CPU."""
MOST_BLOCKS = 1 << 20
"""Addresses are reserved for this many blocks at most, unless a cache asks for more."""


class Account(Protocol):
    """Whose memory blocks are taken from (``decode/memory.py``)."""

    def take(self, num_bytes: int) -> None:
        """Take bytes for a block.

        Raises:
            BusyError: they cannot be had now.
        """
        ...

    def give_back(self, num_bytes: int) -> None:
        """Give a block's bytes back."""
        ...


class Unlimited:
    """An ``Account`` that has everything."""

    def take(self, num_bytes: int) -> None:
        """Take bytes."""

    def give_back(self, num_bytes: int) -> None:
        """Give bytes back."""


@dataclass(frozen=True)
class LayerSpec:
    """Sizes of what one layer stores for an entry."""

    num_heads: int
    key_width: int
    value_width: int
    window: int | None = None
    """A row reads only this many entries, up to its own; None for all."""
    is_int8: bool = False
    """Whether keys and values are stored in eight bits, with a scale for each head of each entry."""

    def entry_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of an entry."""
        scales = 2 * SCALE.itemsize if self.is_int8 else 0
        return self.num_heads * ((self.key_width + self.value_width) * self.itemsize(dtype) + scales)

    def itemsize(self, dtype: torch.dtype) -> int:
        """Return the bytes of a number of a key or value."""
        return 1 if self.is_int8 else dtype.itemsize


def block_size(specs: Sequence[LayerSpec], dtype: torch.dtype) -> int:
    """Return the entries of a block: the fewest of which every head's keys, and its values, fill whole pages.

    At usual head widths these are the 64 entries that attention reads at a time.
    """
    items = {width * spec.itemsize(dtype) for spec in specs for width in (spec.key_width, spec.value_width) if width}
    return lcm(KEY_BLOCK, *(items_to_a_page(item) for item in items))


class BlockPool:
    """The blocks of layers that keep the same entries: all layers of a model, or those with one sliding window."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        num_blocks: int,
        size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Reserve addresses, without allocating memory on a CPU.

        Args:
            specs: sizes of every layer.
            num_blocks: blocks that may be taken at once; on other devices than a CPU the pool grows to it.
            size: entries of a block.
            dtype: dtype of keys and values.
            device: device of keys and values.

        Raises:
            MemoryError: the addresses cannot be reserved.
        """
        self.specs, self.size, self.dtype, self.device = tuple(specs), size, dtype, torch.device(device)
        self.window = specs[0].window
        self.block_bytes = size * sum(spec.entry_bytes(dtype) for spec in specs)
        self.num_copied = 0
        """Blocks that were copied since somebody wrote to one that others read."""
        self._most = num_blocks + 1
        self._states = bytearray([_TAKEN])
        self._holders: dict[int, int] = {}
        self._accounts: dict[int, Account] = {}
        self._frozen: dict[int, int] = {}
        """Of a shared block: how many of its entries others than its writer may read."""
        self._warm: set[int] = set()
        """Free blocks whose memory is still allocated; they are zeros too."""
        self._lock = threading.RLock()
        self._pages: Pages | None = None
        if self.device.type == "cpu":
            self.capacity = self._most * size
            sizes = [sum(whole_pages(prod(s) * d.itemsize) for s, d in self._parts(spec)) for spec in specs]
            self._pages = Pages(sum(sizes))
            starts = [0, *accumulate(sizes)]
            with torch.inference_mode(False):  # blocks are also cleared outside the loop, by cancel
                self._stored = [self._lay_out(spec, first) for spec, first in zip(specs, starts, strict=False)]
        else:
            self.capacity = size * min(self._most, max(1, FIRST_BYTES // self.block_bytes))
            self._stored = [self._made(spec) for spec in specs]
        self._views = self._all_layers()

    def _parts(self, spec: LayerSpec) -> list[tuple[tuple[int, int, int], torch.dtype]]:
        """Return the shapes and dtypes of a layer's keys and values, and of their scales."""
        kind = torch.int8 if spec.is_int8 else self.dtype
        widths = [(spec.key_width, kind), (spec.value_width, kind), *([(1, SCALE)] * 2 if spec.is_int8 else [])]
        return [((spec.num_heads, self.capacity, width), dtype) for width, dtype in widths]

    def _lay_out(self, spec: LayerSpec, first: int) -> tuple[Tensor, ...]:
        """Return the tensors of a layer, from byte ``first`` of the pages on."""
        assert self._pages is not None
        made = []
        for shape, dtype in self._parts(spec):
            made.append(self._pages.tensor(first, shape, dtype))
            first += whole_pages(prod(shape) * dtype.itemsize)  # every part begins a page
        return tuple(made)

    def _all_layers(self) -> list[Tensor]:
        """Return views in which every entry of the pool is once, (..., capacity, D), as few as there can be."""
        if self._pages is None or any(spec != self.specs[0] for spec in self.specs):
            return [part for stored in self._stored for part in stored]
        views, first = [], 0
        layer_bytes = sum(whole_pages(prod(shape) * dtype.itemsize) for shape, dtype in self._parts(self.specs[0]))
        with torch.inference_mode(False):
            for shape, dtype in self._parts(self.specs[0]):
                everything = self._pages.tensor(0, (len(self.specs) * layer_bytes // dtype.itemsize,), dtype)
                strides = (layer_bytes // dtype.itemsize, shape[1] * shape[2], shape[2], 1)
                views.append(everything.as_strided((len(self.specs), *shape), strides, first // dtype.itemsize))
                first += whole_pages(prod(shape) * dtype.itemsize)
        return views

    def _made(self, spec: LayerSpec) -> tuple[Tensor, ...]:
        with torch.inference_mode(False):
            return tuple(torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in self._parts(spec))

    @property
    def num_taken(self) -> int:
        """Return the number of blocks that somebody holds."""
        return len(self._holders)

    def num_holders(self, block: int) -> int:
        """Return how many hold a block."""
        return self._holders[block]

    @property
    def num_shared(self) -> int:
        """Return the number of blocks that several hold."""
        with self._lock:
            return sum(count > 1 for count in self._holders.values())

    def stored(self, layer: int) -> tuple[Tensor, ...]:
        """Return keys and values of a layer of the pool, each (K, capacity, D); block b begins at b * size. Behind them
        are the scales (K, capacity, 1) of both where they are in eight bits.
        """
        return self._stored[layer]

    # Taking and giving back

    def plan(self, count: int) -> range:
        """Set neighbouring blocks aside for a text that will want so many, as far as there are such; holds none."""
        with self._lock:
            first = self._states.find(bytes(count))
            if first < 0:
                first = len(self._states.rstrip(b"\0"))
                count = min(count, self._most - first)
                self._states.extend(bytes(max(0, first + count - len(self._states))))
            planned = range(first, first + max(0, count))
            for block in planned:
                self._states[block] = _PLANNED
            return planned

    def forget(self, planned: Iterable[int]) -> None:
        """Set blocks aside no longer that were not taken."""
        with self._lock:
            for block in planned:
                if self._states[block] == _PLANNED:
                    self._states[block] = _FREE

    def take(self, account: Account, wanted: int | None = None) -> int:
        """Take a block, all zeros.

        Args:
            account: whose memory it is taken from.
            wanted: the block that would be best.

        Raises:
            BusyError: there is no memory for it, or no address.
        """
        account.take(self.block_bytes)
        with self._lock:
            block = self._find(wanted)
            if block is not None:
                self._states[block] = _TAKEN
                self._warm.discard(block)
                self._holders[block], self._accounts[block] = 1, account
                self._grow(block)
                return block
        account.give_back(self.block_bytes)
        raise BusyError(f"all {self._most - 1} blocks of keys and values are in use; try again when texts have ended")

    def _find(self, wanted: int | None) -> int | None:
        if wanted is not None and 0 < wanted < self._most:
            if wanted >= len(self._states):
                self._states.extend(bytes(wanted + 1 - len(self._states)))
            if self._states[wanted] != _TAKEN:
                return wanted
        found = self._states.find(_FREE)
        if found < 0 and len(self._states) < self._most:
            self._states.append(_FREE)
            return len(self._states) - 1
        if found < 0:
            found = self._states.find(_PLANNED)
        return None if found < 0 else found

    def _grow(self, block: int) -> None:
        """Make room for a block on a device whose memory is allocated at once."""
        needed = (block + 1) * self.size
        if needed <= self.capacity:
            return
        before, self.capacity = self._stored, max(needed, 2 * self.capacity)
        self._stored = [self._made(spec) for spec in self.specs]
        for old, new in zip(before, self._stored, strict=True):
            for part, larger in zip(old, new, strict=True):
                larger[:, : part.shape[1]] = part
        self._views = self._all_layers()

    def hold(self, blocks: Iterable[int], frozen: int | None = None) -> None:
        """Hold blocks that others hold already.

        Args:
            blocks: their numbers; 0 is left out.
            frozen: how many entries of the last of them are read; None for all of each.
        """
        blocks = [block for block in blocks if block]
        with self._lock:
            for place, block in enumerate(blocks):
                count = frozen if frozen is not None and place == len(blocks) - 1 else self.size
                self._holders[block] += 1
                self._frozen[block] = max(self._frozen.get(block, 0), count)

    def is_writable(self, block: int, entry: int, *, by_its_writer: bool) -> bool:
        """Return whether one who holds a block may write to this entry of it without another seeing that.

        Args:
            block: its number.
            entry: place in the block.
            by_its_writer: whether the block was taken by who asks, and not shared with them.
        """
        if self._holders[block] == 1:
            self._frozen.pop(block, None)
            return True
        return by_its_writer and entry >= self._frozen.get(block, 0)

    def copied(self, block: int, account: Account, wanted: int | None = None) -> int:
        """Take a block that has what this one has, and hold this one no longer.

        Raises:
            BusyError: there is no memory for it.
        """
        own = self.take(account, wanted)
        source, target = block * self.size, own * self.size
        for entries in self._views:
            entries[..., target : target + self.size, :] = entries[..., source : source + self.size, :]
        self.num_copied += 1
        self.give_back([block])
        return own

    def copies(self, blocks: Sequence[int], first: int, stop: int) -> list[Tensor]:
        """Return copies of entries first..stop-1, counted from the beginning of the first of these blocks.

        For each part that every layer has (keys, values, scales), or each of each layer where layers differ, they are
        a tensor (..., stop - first, D).
        """
        at = self._places(blocks, first, stop)
        return [entries.index_select(-2, at) for entries in self._views]

    def paste(self, blocks: Sequence[int], first: int, stop: int, parts: Sequence[Tensor]) -> None:
        """Store what ``copies`` gave in entries of these blocks, which nobody else may read."""
        at = self._places(blocks, first, stop)
        for entries, part in zip(self._views, parts, strict=True):
            entries.index_copy_(-2, at, part.to(self.device))

    def shapes(self, count: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each tensor that ``copies`` gives of ``count`` entries."""
        return [((*entries.shape[:-2], count, entries.shape[-1]), entries.dtype) for entries in self._views]

    def _places(self, blocks: Sequence[int], first: int, stop: int) -> Tensor:
        """Return where entries of blocks are, (stop - first,)."""
        entry = torch.arange(first, stop)
        starts = torch.tensor(blocks, dtype=torch.int64) * self.size
        return (starts[entry // self.size] + entry % self.size).to(self.device)

    def give_back(self, blocks: Iterable[int]) -> None:
        """Hold blocks no longer; those that nobody holds are cleared and free."""
        gone: list[int] = []
        accounts: list[Account] = []
        with self._lock:
            for block in blocks:
                if not block:
                    continue
                self._holders[block] -= 1
                if not self._holders[block]:
                    del self._holders[block]
                    self._frozen.pop(block, None)
                    accounts.append(self._accounts.pop(block))
                    gone.append(block)
            self._clear(gone)
            for block in gone:
                self._states[block] = _FREE
        for account in accounts:
            account.give_back(self.block_bytes)

    def _clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks: entries that are masked are multiplied by zero, and so must be numbers.

        Of all free blocks the first few stay allocated, since they are taken first; the others' memory is freed.
        """
        if self._pages is None:
            self._overwrite(blocks)
            return
        free = sorted(self._warm.union(blocks))
        kept, cold = free[: WARM_BYTES // self.block_bytes], free[WARM_BYTES // self.block_bytes :]
        self._overwrite(set(kept) - self._warm)
        self._free(cold)
        self._warm = set(kept)

    def _overwrite(self, blocks: Iterable[int]) -> None:
        for first, stop in self._runs(blocks):
            for entries in self._views:
                entries[..., first:stop, :] = 0

    def _free(self, blocks: Iterable[int]) -> None:
        """Give the pages of blocks back to the system, which zeroes them."""
        assert self._pages is not None
        base = self._stored[0][0].data_ptr()
        for first, stop in self._runs(blocks):
            for part in (part for stored in self._stored for part in stored):
                width = part.shape[2] * part.itemsize
                if self.size * width % PAGE:
                    part[:, first:stop] = 0
                    continue
                start = part.data_ptr() - base
                for head in range(part.shape[0]):
                    at = start + (head * part.shape[1] + first) * width
                    self._pages.clear(at, (stop - first) * width)

    def _runs(self, blocks: Iterable[int]) -> list[tuple[int, int]]:
        """Return the first entry and the one past the last of all blocks with neighbouring numbers."""
        runs: list[tuple[int, int]] = []
        for block in sorted(blocks):
            first, stop = block * self.size, (block + 1) * self.size
            if runs and runs[-1][1] == first:
                first = runs.pop()[0]
            runs.append((first, stop))
        return runs


class BlockStore:
    """All blocks of one decoder's texts: a pool for each sliding window that its layers have.

    Layers with the same window need the same entries, so that a pool gives back what its window has passed.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        least: int = 1,
        most: int | None = None,
        size: int | None = None,
    ) -> None:
        """Reserve addresses.

        Args:
            specs: sizes of every layer.
            dtype: dtype of keys and values.
            device: device of keys and values.
            least: blocks of each pool that there must be.
            most: blocks of each pool that there may be; None is what the machine's memory would hold.
            size: entries of a block; None is the best.

        Raises:
            CapacityError: the addresses cannot be reserved; the message names the size.
        """
        self.specs, self.dtype, self.device = tuple(specs), dtype, torch.device(device)
        self.size = block_size(specs, dtype) if size is None else size
        windows = list(dict.fromkeys(spec.window for spec in specs))
        parts = [[spec for spec in specs if spec.window == window] for window in windows]
        self.block_bytes = self.size * sum(spec.entry_bytes(dtype) for spec in specs)
        """Bytes of a block of every pool together."""
        count = min(MOST_BLOCKS, _machine_bytes() // self.block_bytes) if most is None else most
        count = max(least, count)
        while True:
            try:
                self.pools = [BlockPool(part, count, self.size, dtype=dtype, device=device) for part in parts]
                break
            except (MemoryError, RuntimeError) as exc:
                if count == least:
                    raise CapacityError(
                        f"{least} blocks of {self.size} entries need {format_bytes(least * self.block_bytes)}, "
                        "which could not be allocated; lower the batch or max_new_tokens"
                    ) from exc
                count = max(least, count // 2)
        self.num_blocks = count
        self.place_of_layer = []
        """For each layer, its pool and its place among the pool's layers."""
        seen = [0] * len(windows)
        for spec in specs:
            pool = windows.index(spec.window)
            self.place_of_layer.append((pool, seen[pool]))
            seen[pool] += 1

    def stored(self, layer: int) -> tuple[Tensor, ...]:
        """Return keys and values of a layer, each (K, capacity, D), and their scales where there are some."""
        pool, place = self.place_of_layer[layer]
        return self.pools[pool].stored(place)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all blocks that somebody holds."""
        return sum(pool.num_taken * pool.block_bytes for pool in self.pools)

    @property
    def num_copied(self) -> int:
        """Return the number of blocks copied because somebody wrote to one that others read."""
        return sum(pool.num_copied for pool in self.pools)

    def __deepcopy__(self, memo: dict[int, object]) -> BlockStore:
        """Another store, empty, of the same size: a copied decoder has no texts yet."""
        return BlockStore(self.specs, dtype=self.dtype, device=self.device, most=self.num_blocks, size=self.size)

    def __reduce__(self) -> tuple[object, ...]:
        """Texts are not saved with a decoder."""
        return _empty, (self.specs, self.dtype, self.device, self.size)


def _empty(specs: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device, size: int) -> BlockStore:
    return BlockStore(specs, dtype=dtype, device=device, size=size)


def _machine_bytes() -> int:
    """Return the memory of this machine."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 64 << 30
