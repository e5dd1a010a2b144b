"""Prompt lookup against a search through the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode.runs import Result, finish
from tests.decode.steps_at_once import Noting, packed
from tests.decode.tiny_decoders import prompts
from vivace.core.blocks import LayerSpec
from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.core.seams import Context, Draft, Drafter
from vivace.decode.distributions import Distributions
from vivace.decode.lookup import LookupConfig, NgramIndex, PromptLookup
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.errors import ConfigError
from vivace.kernels.native import NativeBody


def searched(tokens: Sequence[int], smallest: int, largest: int, count: int) -> list[int]:
    """The quadratic oracle: longest ending first, its latest earlier occurrence."""
    for size in range(largest, smallest - 1, -1):
        for stop in range(len(tokens) - 1, size - 1, -1):
            if tokens[stop - size : stop] == tokens[len(tokens) - size :]:
                return list(tokens[stop : stop + count])
    return []


texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(texts, st.integers(1, 3), st.integers(0, 3), st.integers(1, 8), st.data())
@settings(max_examples=200, deadline=None)
def test_continuation_is_the_searched_one(
    tokens: list[int], smallest: int, more: int, count: int, data: st.DataObject
) -> None:
    index = NgramIndex(smallest, smallest + more)
    at = 0
    while at < len(tokens):
        stop = data.draw(st.integers(at + 1, len(tokens)))
        index.extend(tokens[at:stop])
        at = stop
        assert index.continuation(count) == searched(tokens[:at], smallest, smallest + more, count)


def new_cache() -> KVCache:
    return KVCache([LayerSpec(1, 2, 2)], 4, 64)


def context(texts: dict[int, list[int]], room: dict[int, int]) -> Context:
    cache = new_cache()
    for slot, tokens in texts.items():
        cache.lengths[slot] = len(tokens) - 1
    return Context(tuple(texts), texts, cache, Distributions({}, texts, cache.lengths), room)


def chains(draft: Draft) -> dict[int, list[int]]:
    """Guesses per slot in path order; fails where the draft is not a chain under each root."""
    assert draft.is_chain
    return {
        slot: [int(t) for t, s, n in zip(draft.tokens, draft.slot, draft.node, strict=True) if s == slot and n >= given]
        for slot, given in zip(draft.slots, draft.committed, strict=True)
    }


@given(st.lists(texts, min_size=1, max_size=4), st.integers(0, 6))
@settings(max_examples=100, deadline=None)
def test_proposals_of_a_batch(written: list[list[int]], room: int) -> None:
    lookup = PromptLookup(LookupConfig(num_draft_tokens=4, min_ngram=1)).open(new_cache())
    slots = {3 - i: tokens for i, tokens in enumerate(written)}
    draft = lookup.propose(context(slots, dict.fromkeys(slots, room)))
    assert draft.probs is None
    for slot, guesses in chains(draft).items():
        assert guesses == searched(slots[slot], 1, 3, min(room, 4))


def test_it_follows_a_growing_text() -> None:
    lookup = PromptLookup(LookupConfig(num_draft_tokens=3, min_ngram=1)).open(new_cache())
    generator = torch.Generator().manual_seed(0)
    text: list[int] = [1]
    for _ in range(60):
        guesses = chains(lookup.propose(context({2: text}, {2: 9})))[2]
        assert guesses == searched(text, 1, 3, 3)
        text = [*text, *torch.randint(0, 4, (1 + len(text) % 3,), generator=generator).tolist()]


def test_it_forgets_with_its_slot() -> None:
    lookup = PromptLookup(LookupConfig(min_ngram=1)).open(new_cache())
    lookup.propose(context({0: [1, 2, 3, 1, 2], 1: [4, 4]}, {}))
    for forget in (lambda: lookup.release([0]), lambda: lookup.truncate([0], [2])):
        forget()
        assert chains(lookup.propose(context({0: [5, 6, 7, 8]}, {}))) == {0: []}
    lookup.release([0, 1, 2])
    assert lookup._index == {}


def test_repetition_is_drafted_and_changes_nothing(models: Callable[..., Decoder], dtype: torch.dtype) -> None:
    model = models(dtype)
    lookup = PromptLookup(LookupConfig(num_draft_tokens=4, min_ngram=1))
    asked = [prompt * 3 for prompt in prompts(6, seed=2, longest=9)]

    def run(method: PromptLookup | NoDrafts) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        session = Session(model, num_slots=3, capacity=80)
        results = finish(session, [Request(p, 30, method, logprobs=True) for p in asked])
        accepted.append(sum(r.stats.num_accepted_draft_tokens for r in results))
        return [(r.tokens, r.logprobs) for r in results]

    accepted: list[int] = []
    assert run(lookup) == run(NoDrafts())
    assert accepted[0] > 0


@pytest.mark.parametrize("fields", [{"num_draft_tokens": 0}, {"min_ngram": 0}, {"min_ngram": 4}])
def test_what_makes_no_sense_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="lookup needs num_draft_tokens >= 1"):
        LookupConfig(**fields)


@pytest.mark.parametrize("asked", [{}, {"logprobs": True}, {"sampling": Sampling(do_sample=True), "seed": 3}])
@pytest.mark.parametrize("slots", [1, 4])
def test_steps_without_a_hit_are_made_in_one_call(body: NativeBody, asked: dict[str, Any], slots: int) -> None:
    """The text, log p and statistics of steps that the session verifies; a batch in which some texts repeat."""
    model = packed("plain", body)
    config = LookupConfig(num_draft_tokens=3, min_ngram=1, max_ngram=2)

    def run(drafter: Drafter, steps: int | None) -> list[Result]:
        session = Session(model, num_slots=slots, capacity=96, chunk=8, steps_per_call=steps)
        return finish(session, [Request(prompt, 20, drafter, **asked) for prompt in prompts(4, seed=2)])

    drafter = Noting(PromptLookup(config, model))
    found, alone = run(drafter, None), run(PromptLookup(config), None)
    assert drafter.steps, "some steps found nothing"
    assert len(drafter.steps) < len(drafter.proposed), "and some did"
    for mine, yours in zip(found, alone, strict=True):
        assert (mine.tokens, mine.logprobs) == (yours.tokens, yours.logprobs)
        for counted in ("num_spec_steps", "num_draft_tokens", "accepted_per_position"):
            assert getattr(mine.stats, counted) == getattr(yours.stats, counted), counted
    drafter.proposed.clear()
    assert [r.tokens for r in run(drafter, 0)] == [r.tokens for r in found]
    assert not drafter.steps
