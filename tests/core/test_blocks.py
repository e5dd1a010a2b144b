"""Blocks that texts share, against a cache in which every slot has entries of its own."""

from __future__ import annotations

import copy
import pickle
import random
from collections import Counter

import pytest
import torch

from tests.core.dense_cache import DenseCache
from vivace.core.block_table import WINDOW_SLACK
from vivace.core.blocks import BlockPool, BlockStore, LayerSpec, Unlimited, block_size
from vivace.core.cache import Blocks, KVCache
from vivace.core.seams import Draft
from vivace.core.step import Step
from vivace.errors import BusyError, CapacityError

SLOTS, CAPACITY, SIZE = 5, 48, 4
SPECS = [LayerSpec(2, 2, 3), LayerSpec(2, 2, 3)]


class Limited:
    """An account with so many bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.free = num_bytes

    def take(self, num_bytes: int) -> None:
        if num_bytes > self.free:
            raise BusyError("none left")
        self.free -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.free += num_bytes


class Both:
    """A cache in blocks and a dense one that are told the same."""

    def __init__(self, rng: random.Random, specs: list[LayerSpec] = SPECS, size: int = SIZE) -> None:
        self.rng = rng
        self.store = BlockStore(specs, dtype=torch.float32, most=SLOTS * CAPACITY, size=size)
        self.account = Limited(1 << 30)
        self.cache = KVCache(specs, SLOTS, CAPACITY, store=self.store, account=self.account)
        self.dense = DenseCache(specs, SLOTS, CAPACITY)
        self.lent: list[tuple[int, Blocks, list[tuple[torch.Tensor, ...]]]] = []

    def write(self) -> None:
        """A tree of guesses below one to three tokens, of which a path is kept."""
        slots = [s for s in range(SLOTS) if self.cache.lengths[s] < CAPACITY - 12 and self.rng.random() < 0.6]
        if not slots:
            return
        draft = Draft.committed_only({slot: [1] * self.rng.randint(1, 3) for slot in slots})
        leaves = draft.last_committed()
        for _ in range(self.rng.randint(0, 2)):
            draft, leaves = draft.grow(leaves, torch.zeros(len(leaves), self.rng.randint(1, 2), dtype=torch.int64))
        step = Step.of(draft, self.cache)
        for layer, spec in enumerate(self.store.specs):
            rows = [torch.randn(len(draft.tokens), spec.num_heads, w) for w in (spec.key_width, spec.value_width)]
            self.cache.put(layer, step, rows[0], rows[1])
            self.dense.put(layer, step.slot, step.entry, rows)
        last = dict(zip(draft.slots, draft.last_rows, strict=True))
        paths = []
        for slot in draft.slots:
            rows = [row for row in range(len(draft.tokens)) if last[slot] in draft.path(row)]
            paths.append([draft.lists.node[row] for row in draft.path(self.rng.choice(rows))])
        for cache in (self.cache, self.dense):
            cache.commit(draft.slots, paths)

    def truncate(self) -> None:
        slot = self.rng.randrange(SLOTS)
        length = self.rng.randint(0, self.cache.lengths[slot])
        for cache in (self.cache, self.dense):
            cache.truncate([slot], [length])

    def release(self) -> None:
        slot = self.rng.randrange(SLOTS)
        for cache in (self.cache, self.dense):
            cache.release([slot])

    def fork(self) -> None:
        source, target = self.rng.sample(range(SLOTS), 2)
        for cache in (self.cache, self.dense):
            cache.release([target])
        copied = self.store.num_copied
        self.cache.fork([source], [target])
        self.dense.fork(source, target, self.dense.lengths[source])
        assert self.store.num_copied == copied, "a fork costs no copy"

    def lend(self) -> None:
        """Keep the beginning of a text, as a cache of prompts does."""
        slot = self.rng.randrange(SLOTS)
        if self.cache.lengths[slot]:
            length = self.rng.randint(1, self.cache.lengths[slot])
            held = [tuple(p.clone() for p in self.dense.span(at, slot, 0, length)) for at in range(len(SPECS))]
            self.lent.append((length, self.cache.lend(slot, 0, length), held))

    def adopt(self) -> None:
        slot = self.rng.randrange(SLOTS)
        if not self.lent:
            return
        length, blocks, held = self.rng.choice(self.lent)
        for cache in (self.cache, self.dense):
            cache.release([slot])
        self.cache.adopt(slot, 0, length, blocks)
        self.cache.commit([slot], [range(length)])
        for layer, parts in enumerate(held):
            for stored, part in zip(self.dense.layers[layer], parts, strict=True):
                stored[slot, :, :length] = part
        self.dense.lengths[slot] = length

    def forget(self) -> None:
        if self.lent:
            _, blocks, _ = self.lent.pop(self.rng.randrange(len(self.lent)))
            for pool, own in zip(self.store.pools, blocks, strict=True):
                pool.give_back(own)

    def check(self) -> None:
        assert self.cache.lengths == self.dense.lengths
        for slot, length in enumerate(self.cache.lengths):
            for layer in range(len(self.store.specs)):
                for ours, theirs in zip(
                    self.cache.entries(layer, slot, length), self.dense.span(layer, slot, 0, length), strict=True
                ):
                    assert torch.equal(ours, theirs)
        held: Counter[int] = Counter()
        for table in self.cache.tables:
            held = Counter(block for blocks in table.blocks for block in blocks if block)
            held.update(block for _, blocks, _ in self.lent for block in blocks[0])
            assert held == table.pool._holders


OPS = {Both.write: 12, Both.truncate: 2, Both.release: 1, Both.fork: 3, Both.lend: 2, Both.adopt: 2, Both.forget: 1}


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_shared_every_text_has_its_own_entries(seed: int) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    both = Both(rng)
    for _ in range(60):
        rng.choices(list(OPS), list(OPS.values()))[0](both)
        both.check()
    both.cache.release(range(SLOTS))
    while both.lent:
        both.forget()
    assert both.store.num_copied > 0, "some wrote where others read"
    assert both.store.nbytes == 0
    assert both.account.free == 1 << 30
    for layer in range(2):
        assert not any(part.any() for part in both.store.stored(layer)), "what is free is zero"


def grown(cache: KVCache, slot: int, length: int) -> None:
    """A text whose entries tell their position."""
    for first in range(cache.lengths[slot], length):
        step = Step.of(Draft.committed_only({slot: [0]}), cache)
        for layer, spec in enumerate(cache.store.specs):
            widths = spec.key_width, spec.value_width
            cache.put(layer, step, *(torch.full((1, spec.num_heads, width), first + 1.0) for width in widths))
        cache.commit([slot], [[0]])


def test_a_window_gives_blocks_back_and_layers_without_one_keep_theirs() -> None:
    specs = [LayerSpec(1, 2, 2, window=8), LayerSpec(1, 2, 2)]
    store = BlockStore(specs, dtype=torch.float32, most=400, size=4)
    cache = KVCache(specs, 1, 400, store=store)
    grown(cache, 0, 200)
    windowed, whole = store.pools
    assert whole.num_taken == 50
    assert windowed.num_taken == 50 - (200 - 8 - WINDOW_SLACK) // 4
    assert torch.equal(cache.span(1, 0, 0, 200)[0][0, :, 0], torch.arange(1.0, 201))
    assert torch.equal(cache.span(0, 0, 192, 200)[0][0, :, 0], torch.arange(193.0, 201))
    assert not cache.span(0, 0, 0, 100)[0].any()
    cache.release([0])
    assert store.nbytes == 0


def test_the_writer_of_a_block_goes_on_behind_what_others_read() -> None:
    cache = KVCache(SPECS[:1], 3, 64, store=BlockStore(SPECS[:1], dtype=torch.float32, most=40, size=8))
    grown(cache, 0, 11)
    cache.fork([0, 0], [1, 2])
    assert cache.store.pools[0].num_taken == 2
    grown(cache, 0, 13)
    assert cache.store.num_copied == 0
    grown(cache, 1, 12)
    assert cache.store.num_copied == 1
    cache.truncate([0], [10])
    grown(cache, 0, 12)
    assert cache.store.num_copied == 2, "slot 2 still reads entry 10 of the block"
    assert cache.span(0, 2, 10, 11)[0].unique().tolist() == [11.0]


def test_texts_get_neighbouring_blocks() -> None:
    store = BlockStore(SPECS[:1], dtype=torch.float32, most=40, size=4)
    cache = KVCache(SPECS[:1], 3, 40, store=store)
    for slot in range(3):
        cache.set_aside(slot, 40)
    for length in range(1, 40, 3):
        for slot in range(3):
            grown(cache, slot, length)
    assert [table.straight for table in cache.tables] == [[10, 10, 10]]
    keys, _ = cache.entries(0, 1, 37)
    assert keys.data_ptr() == cache.stored(0)[0][:, cache.tables[0].blocks[1][0] * 4 :].data_ptr(), "a view"
    cache.release([1])
    cache.set_aside(1, 8)
    grown(cache, 1, 8)
    assert cache.tables[0].blocks[1] == [11, 12], "the first that are free"


def test_all_addresses_in_use_is_busy_and_takes_no_memory() -> None:
    pool = BlockPool(SPECS, 3, 4, dtype=torch.float32)
    account = Limited(10 * pool.block_bytes)
    planned = pool.plan(2)
    assert [pool.take(account) for _ in range(3)] == [3, 1, 2], "what is set aside is taken last"
    with pytest.raises(BusyError, match="all 3 blocks"):
        pool.take(account)
    assert account.free == 7 * pool.block_bytes
    pool.give_back([2])
    pool.forget(planned)
    assert pool.take(Unlimited()) == 2


def test_memory_that_ends_leaves_what_there_was() -> None:
    store = BlockStore(SPECS, dtype=torch.float32, most=40, size=4)
    account = Limited(3 * store.block_bytes)
    cache = KVCache(SPECS, 2, 40, store=store, account=account)
    cache.extend([0], [7])
    with pytest.raises(BusyError):
        cache.extend([1], [7])
    assert (cache.reach(0), cache.reach(1)) == (8, 4)
    cache.release([0])
    cache.extend([1], [7])
    assert account.free == store.block_bytes


def test_a_store_is_neither_copied_nor_saved_with_a_decoder() -> None:
    store = BlockStore(SPECS, dtype=torch.float32, most=4)
    cache = KVCache(SPECS, 1, 8, store=store)
    grown(cache, 0, 3)
    for other in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert (other.nbytes, other.size) == (0, store.size)


def test_sizes_of_blocks() -> None:
    assert [block_size([LayerSpec(2, width, width)], torch.bfloat16) for width in (64, 128, 32, 80, 16)] == [
        *(64, 64, 64, 128, 128)
    ]


@pytest.mark.parametrize("width", [12, 32, 64])
def test_entries_in_eight_bits_are_given_back_as_others_are(width: int) -> None:
    """Scales are smaller than pages, and what lies behind them begins a page all the same."""
    specs = [LayerSpec(2, width, width, is_int8=True)] * 3
    store = BlockStore(specs, dtype=torch.bfloat16, most=5)
    cache = KVCache(specs, 2, 2 * store.size, dtype=torch.bfloat16, store=store)
    for slot in (0, 1):
        step = Step.of(Draft.committed_only({slot: [1] * 9}), cache)
        for layer in range(3):
            cache.put(layer, step, *(torch.full((9, 2, width), slot + 1.0).bfloat16() for _ in "kv"))
        cache.commit([slot], [range(9)])
    cache.release([0])
    assert all((part.float() - 2).abs().max() < 0.02 for layer in range(3) for part in cache.span(layer, 1, 0, 9))
    cache.release([1])
    assert not any(part.any() for layer in range(3) for part in store.stored(layer))


def test_more_than_there_are_addresses() -> None:
    with pytest.raises(CapacityError, match="could not be allocated; lower the batch"):
        KVCache([LayerSpec(8, 128, 128)] * 80, 1 << 20, 1 << 20)
