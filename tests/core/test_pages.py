"""Memory that is taken as it is written: what a cache says it takes is what the system counts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.core.entries import all_entries, write_entries
from vivace.core.blocks import WARM_BYTES, LayerSpec
from vivace.core.cache import KVCache
from vivace.core.pages import PAGE, Pages, items_to_a_page, whole_pages
from vivace.errors import CapacityError

MIB = 1 << 20
ENTRY = 32 * 2 * 8 * 128 * 2
"""Bytes of an entry of Llama 3's 8B."""
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the system does not count, or does not take back")


def resident() -> int:
    """Memory that this process has written, as the kernel counts it."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def write(cache: KVCache, slot: int, entries: int) -> None:
    """As layers do, all of them."""
    cache.extend([slot], [entries])
    for layer in range(len(cache.store.specs)):
        write_entries(cache, layer, slot, 0, entries, 1.0)


@linux_only
def test_a_server_of_eight_billion_parameters_takes_no_memory_before_it_is_asked() -> None:
    """Llama 3's 8B at the server's defaults, 16 texts of 8192 tokens: 17 GB, all of it taken at the start once."""
    before = resident()
    cache = KVCache([LayerSpec(8, 128, 128)] * 32, 16, 8192 + 64, dtype=torch.bfloat16)
    assert cache.slot_bytes(cache.capacity) * cache.num_slots > 17e9
    assert resident() - before < 4 * MIB
    for slot, entries in ((3, 300), (15, 17)):
        before = resident()
        write(cache, slot, entries)
        assert 0.9 * entries * ENTRY < resident() - before <= cache.slot_bytes(entries) + 4 * MIB
    assert not any(stored.any() for stored in cache.span(0, 4, 0, 300))
    held = resident()
    cache.release([3, 15])
    assert held - resident() > 0.9 * (300 + 17) * ENTRY - WARM_BYTES


@linux_only
def test_a_few_blocks_stay_allocated_for_the_next_text_and_no_more() -> None:
    spec = LayerSpec(8, 128, 128)
    cache = KVCache([spec] * 8, 2, 4096, dtype=torch.bfloat16)
    write(cache, 0, 64)
    before = resident()
    for _ in range(3):
        cache.release([0])
        write(cache, 0, 64)
        assert abs(resident() - before) < cache.slot_bytes(1) // 4, "neither freed nor taken anew"
    write(cache, 1, 4096)
    held = resident()
    cache.release([0, 1])
    assert resident() < held - cache.slot_bytes(4096) + WARM_BYTES
    assert not any(stored.any() for layer in range(8) for stored in cache.store.stored(layer))


@linux_only
def test_entries_without_values_are_freed() -> None:
    """The states of sources that EL-attention reads, 32 MiB of them."""
    cache = KVCache([LayerSpec(1, 1024, 0)], 1, 8192)
    assert cache.slot_bytes(8192) == 8192 * 1024 * 4
    write(cache, 0, 8192)
    held = resident()
    cache.release([0])
    assert resident() < held - cache.slot_bytes(8192) + WARM_BYTES + MIB
    assert not any(stored.any() for stored in cache.store.stored(0))


@pytest.mark.parametrize("spec", [LayerSpec(2, 80, 80), LayerSpec(3, 16, 24), LayerSpec(1, 65, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slot_that_is_given_back_is_zero_and_its_neighbours_are_not(spec: LayerSpec, dtype: torch.dtype) -> None:
    cache = KVCache([spec] * 2, 3, 100, dtype=dtype)
    for slot in range(3):
        write(cache, slot, 70 + slot)
    cache.release([1])
    for layer in range(2):
        for stored in all_entries(cache, layer):
            assert not stored[1].any()
            for slot in (0, 2):
                assert (stored[slot, :, : 70 + slot] == 1).all()
    write(cache, 1, 3)
    assert all((stored == 1).all() for stored in cache.span(1, 1, 0, 3))


@linux_only
@pytest.mark.parametrize("spec", [LayerSpec(2, 80, 80), LayerSpec(4, 16, 24), LayerSpec(1, 65, 1)])
def test_no_slot_takes_more_than_it_says(spec: LayerSpec) -> None:
    cache = KVCache([spec] * 40, 4, 2000)
    for slot, entries in enumerate((1, 65, 700, 2000)):
        before = resident()
        write(cache, slot, entries)
        assert resident() - before <= cache.slot_bytes(entries) + MIB // 2


def test_pages_of_items() -> None:
    assert whole_pages(0) == 0
    assert whole_pages(1) == whole_pages(PAGE) == PAGE
    assert items_to_a_page(PAGE) == 1
    assert all(items_to_a_page(size) * size % PAGE == 0 for size in (1, 24, 130, 256, PAGE + 1))


def test_memory_that_a_tensor_needs_stays() -> None:
    tensor = Pages(3 * PAGE).tensor(PAGE, (2, 4), torch.float32)
    tensor.fill_(2)
    assert tensor.sum() == 16


def test_more_addresses_than_there_are() -> None:
    for size in (1 << 62, 1 << 70):
        with pytest.raises(MemoryError):
            Pages(size)
    with pytest.raises(CapacityError, match="could not be allocated; lower the batch"):
        KVCache([LayerSpec(8, 128, 128)] * 80, 1 << 20, 1 << 20)
