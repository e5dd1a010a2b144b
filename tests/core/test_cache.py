"""The cache against lists of tokens, with everything nobody may read poisoned after every operation."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.core.decoders import VOCAB, build, tokens
from tests.core.entries import spoil, write_entries
from vivace.core.blocks import LayerSpec
from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Draft
from vivace.core.step import Step
from vivace.errors import CapacityError

SLOTS = 5
CAPACITY = 64


class Oracle:
    """What every slot should hold: a list of tokens."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = [[] for _ in range(SLOTS)]


def contents(token_ids: list[int]) -> torch.Tensor:
    """What is stored for tokens: the token beside its position, (K, n, D)."""
    pairs = torch.tensor([[float(t), float(place)] for place, t in enumerate(token_ids)]).view(-1, 2)
    return pairs.expand(2, -1, -1)


def write(cache: KVCache, draft: Draft) -> Step:
    step = Step.of(draft, cache)
    rows = torch.stack((draft.tokens.float(), step.position.float()), -1)[:, None].expand(-1, 2, -1)
    for layer in range(2):
        cache.put(layer, step, rows + layer, rows - layer)
    return step


def random_draft(rng: random.Random, slots: list[int]) -> Draft:
    draft = Draft.committed_only({slot: [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))] for slot in slots})
    grown = draft.last_committed()
    for _ in range(rng.randint(0, 3)):
        width = rng.randint(1, 2)
        draft, grown = draft.grow(grown, torch.randint(0, VOCAB, (len(grown), width)))
    return draft


def random_paths(rng: random.Random, draft: Draft) -> list[list[int]]:
    """Rows from each slot's first token to a random node at or below its root."""
    paths = []
    for slot, root in zip(draft.slots, draft.last_committed().tolist(), strict=True):
        rows = [row for row in range(len(draft.tokens)) if int(draft.slot[row]) == slot and row >= root]
        below = [row for row in rows if root in draft.path(row)]
        paths.append(draft.path(rng.choice(below)))
    return paths


def extend(cache: KVCache, oracle: Oracle, rng: random.Random) -> None:
    slots = [s for s in rng.sample(range(SLOTS), rng.randint(1, SLOTS)) if cache.lengths[s] < CAPACITY - 20]
    if not slots:
        return
    draft = random_draft(rng, slots)
    write(cache, draft)
    paths = random_paths(rng, draft)
    cache.commit(slots, [draft.node[torch.tensor(path)].tolist() for path in paths])
    for slot, path in zip(slots, paths, strict=True):
        oracle.texts[slot] += draft.tokens[torch.tensor(path)].tolist()


def truncate(cache: KVCache, oracle: Oracle, rng: random.Random) -> None:
    slots = rng.sample(range(SLOTS), 2)
    lengths = [rng.randint(0, cache.lengths[s]) for s in slots]
    cache.truncate(slots, lengths)
    for slot, length in zip(slots, lengths, strict=True):
        oracle.texts[slot] = oracle.texts[slot][:length]


def release(cache: KVCache, oracle: Oracle, rng: random.Random) -> None:
    slots = rng.sample(range(SLOTS), 2)
    cache.release(slots)
    for slot in slots:
        oracle.texts[slot] = []


def poison(cache: KVCache, value: float = math.nan) -> None:
    """Everything behind the committed tokens."""
    spoil(cache, value)


@pytest.mark.parametrize("seed", range(20))
def test_against_lists(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    cache, oracle = KVCache([LayerSpec(2, 2, 2)] * 2, SLOTS, CAPACITY), Oracle()
    for _ in range(40):
        rng.choices([extend, truncate, release], [6, 2, 1])[0](cache, oracle, rng)
        poison(cache)
        assert cache.lengths == [len(text) for text in oracle.texts]
        for slot, text in enumerate(oracle.texts):
            for layer in range(2):
                keys, values = cache.span(layer, slot, 0, len(text))
                assert torch.equal(keys, contents(text) + layer)
                assert torch.equal(values, contents(text) - layer)


@pytest.mark.parametrize("variant", ["plain", "windows", "softcaps"])
def test_nobody_reads_behind_the_end(variant: str, dtype: torch.dtype) -> None:
    decoder = build(variant, dtype)
    prompts = {0: tokens(30, 1), 3: tokens(64, 2), 1: tokens(7, 3)}
    outputs = []
    for value in (0.0, math.nan if dtype == torch.float32 else 1e4):
        cache = decoder.new_cache(4, 128)
        poison(cache, value)
        hidden = []
        fill(decoder, cache, prompts)
        poison(cache, value)
        for token in range(3):
            draft = Draft.committed_only({slot: [token] for slot in prompts})
            draft, _ = draft.grow(draft.last_committed(), torch.tensor([[5, 6], [7, 8], [9, 10]]))
            step = Step.of(draft, cache)
            hidden.append(decoder.run(decoder.embed(draft.tokens, step), step))
            nodes = [[0, 2], [0, 1], [0]]
            cache.commit(tuple(prompts), nodes)
            poison(cache, value)
        outputs.append(torch.cat(hidden))
    assert torch.equal(*outputs)
    assert outputs[0].isfinite().all()


def fill(decoder: Decoder, cache: KVCache, prompts: dict[int, list[int]]) -> None:
    draft = Draft.committed_only(prompts)
    step = Step.of(draft, cache, chunk=True)
    decoder.run(decoder.embed(draft.tokens, step), step)
    cache.commit(draft.slots, [range(count) for count in draft.committed])


def test_a_released_slot_leaves_nothing_to_the_next(dtype: torch.dtype) -> None:
    """Not even numbers that are none."""
    decoder = build("plain", dtype)
    cache = decoder.new_cache(2, 64)
    fill(decoder, cache, {0: tokens(40, 1)})
    write_entries(cache, 1, 0, 0, 40, math.nan)
    cache.release([0])
    fill(decoder, cache, {0: tokens(9, 2)})
    draft = Draft.committed_only({0: [3]})
    step = Step.of(draft, cache)
    assert decoder.run(decoder.embed(draft.tokens, step), step).isfinite().all()


def test_writing_beyond_the_end_is_caught() -> None:
    decoder = build("plain")
    cache = decoder.new_cache(2, 64)
    last = cache.capacity
    with pytest.raises(AssertionError, match=f"entry {last} of a slot of {last}"):
        Step.of(Draft.committed_only({0: tokens(last + 1)}), cache)


def test_more_than_the_memory_holds() -> None:
    with pytest.raises(CapacityError, match=r"could not be allocated; lower the batch"):
        KVCache([LayerSpec(8, 128, 128)] * 80, 1 << 20, 1 << 20)


def test_what_was_saved_comes_back_whatever_was_stored_and_filled_since() -> None:
    cache = KVCache([LayerSpec(2, 2, 2)] * 2, SLOTS, CAPACITY)
    held, late = cache.lengths, (1, torch.tensor([2]), torch.zeros(1, 2))
    write(cache, Draft.committed_only({1: [3, 4, 5], 4: [6]}))
    cache.commit([1, 4], [range(3), range(1)])
    cache.pending[1].add(*late)
    saved = cache.saved()
    write(cache, Draft.committed_only({1: [7, 8], 4: [9]}))
    cache.commit([1, 4], [[1], range(1)])
    cache.pending[1].take(1)
    cache.pending[4].add(*late)
    cache.restore(saved)
    assert cache.lengths is held, "others look at the same list"
    assert held == [0, 3, 0, 0, 1]
    assert [len(pending) for pending in cache.pending] == [0, 1, 0, 0, 0]
    assert cache.pending[1].at(1).tolist() == [2]
    assert torch.equal(cache.span(0, 1, 0, 3)[0], contents([3, 4, 5]))


def test_a_window_keeps_what_waiting_tokens_will_read() -> None:
    """However many of a text's last tokens have left early: their upper layers read as far back as they would have."""
    cache = KVCache([LayerSpec(2, 4, 4, window=8)] * 2, 1, 4096)
    table, waiting, length = cache.tables[0], cache.store.size + 20, 4 * cache.store.size
    cache.extend([0], [length])
    cache.commit([0], [range(waiting)])
    late = torch.arange(waiting, length)
    cache.pending[0].add(1, late, torch.zeros(len(late), 4))
    cache.commit([0], [range(length - waiting)])
    assert all(cache.pending[0].at(1) == late)
    assert all(table.blocks[0][(waiting - 7) // cache.store.size :])
    cache.pending[0].take(1)
    cache.extend([0], [length + 1])
    cache.commit([0], [range(1)])
    assert table.blocks[0][:3] == [0, 0, 0]
