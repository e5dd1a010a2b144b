"""Cached prompts: the bits of prefill, or nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import vivace
from tests.core.entries import write_entries
from tests.tiny_checkpoints import make_checkpoint
from vivace.core.cache import KVCache
from vivace.decode.memory import MemoryBudget
from vivace.decode.prefix import PrefixCache, Salted
from vivace.engine import Engine

CHUNK = 8


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return vivace.load(make_checkpoint(tmp_path_factory.mktemp("prefix")))


@pytest.fixture
def prefix(engine: Engine) -> PrefixCache:
    return PrefixCache(engine.model.config, chunk=CHUNK, max_bytes=1 << 20)


def filled(engine: Engine, length: int) -> KVCache:
    """A cache whose slot 0 holds numbers that tell entries apart."""
    cache = engine.model.new_cache(2, 64)
    cache.extend([0], [length])
    for layer in range(engine.model.config.num_layers):
        part = cache.span(layer, 0, 0, length)[0]
        write_entries(cache, layer, 0, 0, length, torch.arange(part.numel()).view_as(part).to(part.dtype))
    cache.commit([0], [range(length)])
    return cache


def tops(tokens: list[int]) -> Tensor:
    """Residuals that tell by their number which token they are of, and behind which others, (tokens, 3)."""
    numbers = [hash(tuple(tokens[: place + 1])) % 4093 for place in range(len(tokens))]
    return torch.tensor(numbers).view(-1, 1).expand(-1, 3)


def keep(part: Salted, tokens: list[int], cache: KVCache) -> None:
    part.keep(tokens, 0, cache, tops(tokens))


def attach(part: Salted, tokens: list[int], slot: int, cache: KVCache) -> int:
    """How many tokens are there now; their residuals are those that were kept."""
    found = part.attach(tokens, slot, cache)
    known = sum(map(len, found))
    assert torch.equal(torch.cat([tops([]), *found]), tops(tokens[:known]))
    return known


def test_entries_come_back_as_they_were(engine: Engine, prefix: PrefixCache) -> None:
    tokens, cache = list(range(20)), filled(engine, 20)
    keep(prefix.salted(None), tokens, cache)
    assert attach(prefix.salted(None), tokens, 1, cache) == 20
    assert cache.lengths == [20, 20]
    for layer in range(engine.model.config.num_layers):
        for own, other in zip(cache.span(layer, 0, 0, 20), cache.span(layer, 1, 0, 20), strict=True):
            assert torch.equal(own, other)
    cache.release([1])
    assert not cache.span(0, 1, 0, 20)[0].any(), "what was attached is cleared like what was written"


@pytest.mark.parametrize(
    ("tokens", "known"),
    [
        (list(range(20)), 20),
        (list(range(19)), 16),  # its last chunk is another one: shorter
        (list(range(24)), 16),  # and here longer
        (list(range(16)), 16),
        ([*range(7), 99, *range(8, 20)], 0),
        ([*range(8), 99, *range(9, 20)], 8),
        (list(range(5)), 0),
    ],
)
def test_only_what_prefill_would_write(engine: Engine, prefix: PrefixCache, tokens: list[int], known: int) -> None:
    cache = filled(engine, 20)
    keep(prefix.salted(None), list(range(20)), cache)
    assert attach(prefix.salted(None), tokens, 1, cache) == known
    assert (prefix.num_queries, prefix.num_hits) == (len(tokens), known)


def test_another_salt_finds_nothing(engine: Engine, prefix: PrefixCache) -> None:
    cache = filled(engine, 20)
    keep(prefix.salted("a"), list(range(20)), cache)
    assert attach(prefix.salted("b"), list(range(20)), 1, cache) == 0
    assert attach(prefix.salted(None), list(range(20)), 1, cache) == 0


def test_the_least_recently_used_leave_first(engine: Engine) -> None:
    one = PrefixCache(engine.model.config, chunk=CHUNK, max_bytes=1 << 20)
    keep(one.salted(None), [0] * CHUNK, filled(engine, CHUNK))
    small = PrefixCache(engine.model.config, chunk=CHUNK, max_bytes=2 * one.nbytes)
    for token in (1, 2):
        keep(small.salted(None), [token] * CHUNK, filled(engine, CHUNK))
    cache = engine.model.new_cache(2, 64)
    attach(small.salted(None), [1] * CHUNK, 1, cache)
    cache.release([1])
    keep(small.salted(None), [3] * CHUNK, filled(engine, CHUNK))
    assert small.nbytes == 2 * one.nbytes
    found = {}
    for token in (1, 2, 3):
        found[token] = attach(small.salted(None), [token] * CHUNK, 1, cache)
        cache.release([1])
    assert found == {1: CHUNK, 2: 0, 3: CHUNK}


def test_no_salt_can_spell_the_tokens_of_another_prompt(engine: Engine, prefix: PrefixCache) -> None:
    """A salt of "\\0" and the first seven bytes of token 40 once gave the key of a prompt that begins with it."""
    cache = filled(engine, 20)
    salt = b"\0(\0\0\0\0\0\0".decode()
    keep(prefix.salted(salt), [41, 42], cache)
    assert attach(prefix.salted(None), [40, 41, 42], 1, cache) == 0
    keep(prefix.salted(None), [40, 41, 42], cache)
    assert attach(prefix.salted(None), [40, 41, 42], 1, cache) == 3


def test_the_beginning_of_a_prompt_leaves_last(engine: Engine) -> None:
    """Without it nothing behind it is found."""
    one = PrefixCache(engine.model.config, chunk=CHUNK, max_bytes=1 << 20)
    keep(one.salted(None), [0] * CHUNK, filled(engine, CHUNK))
    small = PrefixCache(engine.model.config, chunk=CHUNK, max_bytes=2 * one.nbytes)
    keep(small.salted(None), [1] * CHUNK + [2] * CHUNK, filled(engine, 2 * CHUNK))
    keep(small.salted(None), [3] * CHUNK, filled(engine, CHUNK))
    assert attach(small.salted(None), [1] * CHUNK + [2] * CHUNK, 1, engine.model.new_cache(2, 64)) == CHUNK
    assert len(small) == 2


def test_texts_that_need_memory_have_it_from_kept_ones(engine: Engine) -> None:
    """Whose blocks are in use is not evicted, as nothing would be free for it."""
    kept = PrefixCache(engine.model.config, chunk=CHUNK, max_bytes=1 << 30)
    budget = MemoryBudget(4 * engine.model.blocks.block_bytes)
    budget.may_evict(kept)
    for token in (1, 2, 3):
        cache = engine.model.new_cache(2, 64, account=budget)
        cache.extend([0], [CHUNK])
        keep(kept.salted(None), [token] * CHUNK, cache)
        del cache
    using = engine.model.new_cache(2, 64, account=budget)
    assert attach(kept.salted(None), [1] * CHUNK, 0, using) == CHUNK
    assert budget.has_room(2 * engine.model.blocks.block_bytes)
    assert not budget.has_room(4 * engine.model.blocks.block_bytes)
    using.extend([1], [CHUNK])
    assert (len(kept), kept.num_evicted) == (2, 1)
    other = engine.model.new_cache(1, 64)
    found = [attach(kept.salted(None), [token] * CHUNK, 0, other) for token in (2,)]
    assert found == [0], "the least recently used"
    del using, other, kept
    assert budget.taken_bytes == 0


def test_any_common_beginning_is_shared_where_prompts_are_read_row_by_row(engine: Engine) -> None:
    prefix = PrefixCache(engine.model.config, chunk=CHUNK, max_bytes=1 << 20, by_row=True)
    keep(prefix.salted(None), list(range(20)), filled(engine, 20))
    for tokens, known in (
        ([*range(13), 99], 13),
        (list(range(19)), 19),
        (list(range(24)), 20),
        ([0, 99], 1),
        ([99, 1], 0),
    ):
        cache = engine.model.new_cache(2, 64)
        assert attach(prefix.salted(None), tokens, 1, cache) == known
        assert cache.lengths == [0, known]
    keep(prefix.salted(None), list(range(23)), filled(engine, 23))
    assert len(prefix) == 3, "a stretch that is part of a longer one is not kept beside it"


TEXTS = st.lists(st.sampled_from([40, 41, 0]), min_size=1, max_size=7)
SALTS = st.sampled_from([None, "\0", "a", "\0(\0\0\0\0\0\0", "(\0\0\0\0\0\0\0", "a\0"])
OWNERS = st.sampled_from([b"", b"a", b"\0"])


def write(cache: KVCache, text: tuple[object, ...], tokens: list[int]) -> None:
    """Fill slot 0 with entries that tell by their number which text they belong to."""
    cache.extend([0], [len(tokens)])
    for place in range(len(tokens)):
        for layer in range(2):
            write_entries(cache, layer, 0, place, place + 1, float(hash((*text, *tokens[: place + 1])) % 4093))


@pytest.mark.parametrize("by_row", [False, True])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(OWNERS, SALTS, TEXTS), min_size=2, max_size=12), st.integers(0, 12))
def test_whatever_is_asked_only_its_own_entries_come_back(
    engine: Engine, by_row: bool, asked: list[tuple[bytes, str | None, list[int]]], blocks: int
) -> None:
    max_bytes = blocks * (engine.model.blocks.block_bytes + 100)
    prefix = PrefixCache(engine.model.config, chunk=3, max_bytes=max_bytes, by_row=by_row)
    for owner, salt, tokens in asked:
        wanted, found = engine.model.new_cache(1, 8), engine.model.new_cache(1, 8)
        write(wanted, (owner, salt), tokens)
        known = attach(prefix.salted(salt, owner), tokens, 0, found)
        assert by_row or known in (0, 3, 6, len(tokens))
        for layer in range(2):
            for ours, theirs in zip(wanted.span(layer, 0, 0, known), found.span(layer, 0, 0, known), strict=True):
                assert torch.equal(ours, theirs)
        keep(prefix.salted(salt, owner), tokens, wanted)
        assert prefix.nbytes <= max_bytes
