"""Cached prompts: the bits of prefill, or nothing."""

from __future__ import annotations

import pytest
import torch

from vivace.core.cache import KVCache
from vivace.engine import Engine
from vivace.serve.prefix import PrefixCache

CHUNK = 8


@pytest.fixture
def prefix(engine: Engine) -> PrefixCache:
    return PrefixCache(engine.model.config, chunk=CHUNK, max_bytes=1 << 20)


def filled(engine: Engine, length: int) -> KVCache:
    """A cache whose slot 0 holds numbers that tell entries apart."""
    cache = engine.model.new_cache(2, 64)
    for layer in range(engine.model.config.num_layers):
        for stored in cache.span(layer, 0, 0, length):
            stored.copy_(torch.arange(stored.numel()).view_as(stored))
    cache.reserve([0], [length - 1])
    cache.commit([0], [range(length)])
    return cache


def test_entries_come_back_as_they_were(engine: Engine, prefix: PrefixCache) -> None:
    tokens, cache = list(range(20)), filled(engine, 20)
    prefix.salted(None).keep(tokens, 0, cache)
    assert prefix.salted(None).attach(tokens, 1, cache) == 20
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
    prefix.salted(None).keep(list(range(20)), 0, cache)
    assert prefix.salted(None).attach(tokens, 1, cache) == known
    assert (prefix.num_queries, prefix.num_hits) == (len(tokens), known)


def test_another_salt_finds_nothing(engine: Engine, prefix: PrefixCache) -> None:
    cache = filled(engine, 20)
    prefix.salted("a").keep(list(range(20)), 0, cache)
    assert prefix.salted("b").attach(list(range(20)), 1, cache) == 0
    assert prefix.salted(None).attach(list(range(20)), 1, cache) == 0


def test_the_least_recently_used_leave_first(engine: Engine) -> None:
    cache = filled(engine, CHUNK)
    one = PrefixCache(engine.model.config, chunk=CHUNK, max_bytes=1 << 20)
    one.salted(None).keep([0] * CHUNK, 0, cache)
    small = PrefixCache(engine.model.config, chunk=CHUNK, max_bytes=2 * one.nbytes)
    for token in (1, 2):
        small.salted(None).keep([token] * CHUNK, 0, cache)
    small.salted(None).attach([1] * CHUNK, 1, cache)
    cache.release([1])
    small.salted(None).keep([3] * CHUNK, 0, cache)
    assert small.nbytes == 2 * one.nbytes
    found = {}
    for token in (1, 2, 3):
        found[token] = small.salted(None).attach([token] * CHUNK, 1, cache)
        cache.release([1])
    assert found == {1: CHUNK, 2: 0, 3: CHUNK}
