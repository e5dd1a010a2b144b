"""The cache of one layer's neurons, held against a naive one that keeps sets."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch

from vivace.storage.neurons.cache import NeuronCache, runs

STRIDE = 16
COUNT = 200


def filled(cache: NeuronCache, active: list[int]) -> int:
    """Turn the cache and put each neuron's own bytes into its row; returns how many were read."""
    read = 0
    wanted = cache.turn(torch.tensor(active, dtype=torch.int64))
    for neuron, row, length in zip(*(each.tolist() for each in wanted), strict=True):
        for place in range(length):
            cache.rows[row + place] = torch.full((STRIDE,), (neuron + place) % 256, dtype=torch.uint8)
        read += length
    return read


def check(cache: NeuronCache) -> set[int]:
    used = cache.pointer[: cache.num_used]
    assert torch.equal(cache.rows[: cache.num_used], (used % 256).to(torch.uint8)[:, None].expand(-1, STRIDE))
    assert torch.equal(cache.row_of[used], torch.arange(cache.num_used))
    assert (cache.row_of >= 0).sum() == cache.num_used
    expected = torch.zeros(COUNT, dtype=torch.int32)
    for active in cache.recent:
        expected[active] += 1
    assert torch.equal(cache.uses, expected)
    return set(used.tolist())


@pytest.mark.parametrize("room", [200, 60, 30])
@pytest.mark.parametrize("window", [1, 4])
def test_random_streams(room: int, window: int) -> None:
    draw = random.Random(room + window)
    cache = NeuronCache(COUNT, room, STRIDE, window)
    recent: deque[set[int]] = deque(maxlen=window)
    for _ in range(300):
        active = sorted(draw.sample(range(COUNT), draw.choice([0, 1, 10, 25, 30])))
        before, moved = set(cache.pointer[: cache.num_used].tolist()), cache.num_moved
        read = filled(cache, active)
        after = check(cache)
        recent.append(set(active))
        assert read == len(set(active) - before)
        assert set(active) <= after <= set().union(*recent)
        assert after == set().union(*(set(each.tolist()) for each in cache.recent))
        assert cache.num_used <= room
        assert cache.num_moved - moved <= len(before - after)
        if room == 200:
            assert after == set().union(*recent)


@pytest.mark.parametrize("seed", range(3))
def test_a_longer_window_never_reads_more(seed: int) -> None:
    draw = random.Random(seed)
    hot = draw.sample(range(COUNT), 30)
    stream = [sorted({*draw.sample(hot, 12), *draw.sample(range(COUNT), 6)}) for _ in range(80)]
    reads = []
    for window in range(1, 6):
        cache = NeuronCache(COUNT, COUNT, STRIDE, window)
        reads.append(sum(filled(cache, active) for active in stream))
    assert reads == sorted(reads, reverse=True)
    assert reads[0] > reads[-1]


def test_forgetting() -> None:
    cache = NeuronCache(COUNT, 50, STRIDE, 4)
    filled(cache, [1, 2, 3])
    cache.forget()
    assert check(cache) == set()
    assert filled(cache, [2, 3, 4]) == 3


def test_neighbours_are_read_together() -> None:
    found = runs(torch.tensor([3, 4, 5, 9, 11, 12]), 7)
    assert [each.tolist() for each in found] == [[3, 9, 11], [7, 10, 11], [3, 1, 2]]
    assert found.extents(1000, 16).tolist() == [[1048, 112, 48], [1144, 160, 16], [1176, 176, 32]]
    nothing = runs(torch.tensor([], dtype=torch.int64), 0)
    assert [each.tolist() for each in nothing] == [[], [], []]
    assert nothing.extents(1000, 16).shape == (0, 3)


def test_memory_is_taken_once() -> None:
    cache = NeuronCache(COUNT, 60, STRIDE, 4)
    place = cache.rows.data_ptr()
    for first in range(0, 150, 3):
        filled(cache, list(range(first, first + 20)))
    assert cache.rows.data_ptr() == place
