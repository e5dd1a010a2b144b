"""Entries of a cache as tests look at them and change them: slot by slot, wherever their blocks lie."""

from __future__ import annotations

import torch
from torch import Tensor

from vivace.core.cache import KVCache


def places(cache: KVCache, layer: int, slot: int, start: int, stop: int) -> Tensor:
    """Where a layer has entries start..stop-1 of a slot."""
    pool = cache.store.place_of_layer[layer][0]
    return cache.addresses(pool, torch.tensor(slot), torch.arange(start, stop))


def write_entries(cache: KVCache, layer: int, slot: int, start: int, stop: int, value: float | Tensor) -> None:
    """Set keys and values of entries that have blocks, to a number or to (K, stop - start, D)."""
    assert stop <= cache.reach(slot)
    for stored in cache.stored(layer):
        stored[:, places(cache, layer, slot, start, stop)] = value  # type: ignore[assignment]


def all_entries(cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
    """Copies of keys and values of every slot, each (slots, K, capacity, D); zeros where a slot has no block."""
    keys, values = zip(*(cache.span(layer, slot, 0, cache.capacity) for slot in range(cache.num_slots)), strict=True)
    return torch.stack(keys), torch.stack(values)


def spoil(cache: KVCache, value: float) -> None:
    """Set everything behind the committed tokens, in blocks that a slot has."""
    for layer in range(len(cache.store.specs)):
        for slot, length in enumerate(cache.lengths):
            if length < cache.reach(slot):
                write_entries(cache, layer, slot, length, cache.reach(slot), value)


def in_blocks(keys: Tensor, values: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, int]]:
    """Keys and values (slots, K, S, D) as native attention takes them, in blocks of 64 or what divides S, shuffled."""
    slots, heads, length, _ = keys.shape
    size = next(size for size in (64, 16, 5, 1) if length % size == 0)
    count = length // size
    order = torch.randperm(slots * count, generator=torch.Generator().manual_seed(length)) + 1
    table = (order * size).view(slots, count)
    stored = []
    for part in (keys, values):
        blocks = torch.zeros(heads, (slots * count + 1) * size, part.shape[3], dtype=part.dtype)
        address = (table[:, :, None] + torch.arange(size)).view(slots, length)
        for slot in range(slots):
            blocks[:, address[slot]] = part[slot]
        stored.append(blocks)
    return (stored[0], stored[1]), (table, size)


def set_entries(cache: KVCache, before: list[tuple[Tensor, Tensor]]) -> None:
    """Set all entries that have blocks to what ``all_entries`` gave for each layer."""
    for layer, parts in enumerate(before):
        for stored, part in zip(cache.stored(layer), parts, strict=True):
            for slot in range(cache.num_slots):
                reach = cache.reach(slot)
                stored[:, places(cache, layer, slot, 0, reach)] = part[slot, :, :reach]
