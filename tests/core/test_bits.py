"""A row gets the same bits alone, among sixteen, and as a node of a draft tree."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.core.decoders import OF_NORMS_AND_PLACES, VOCAB, tokens
from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Draft
from vivace.core.step import Step

LENGTHS = (1, 2, 3, 8, 17, 31, 40, 62, 63, 64, 65, 70, 90, 100, 127, 128)
CAPACITY = 192
pytestmark = pytest.mark.slow_where(lambda decoder, dtype: dtype == torch.float32 and decoder in OF_NORMS_AND_PLACES)


def ascend(decoder: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> Tensor:
    step = Step.of(draft, cache, chunk=chunk)
    return decoder.run(decoder.embed(draft.tokens, step), step)


def prefill(decoder: Decoder, prompts: dict[int, list[int]], num_slots: int) -> tuple[KVCache, Tensor]:
    cache = decoder.new_cache(num_slots, CAPACITY)
    draft = Draft.committed_only(prompts)
    hidden = ascend(decoder, draft, cache, chunk=True)
    cache.commit(draft.slots, [range(count) for count in draft.committed])
    return cache, hidden


def same_spans(decoder: Decoder, first: KVCache, a: int, second: KVCache, b: int) -> bool:
    length = first.lengths[a]
    return first.lengths[a] == second.lengths[b] and all(
        torch.equal(x, y)
        for layer in range(decoder.config.num_layers)
        for x, y in zip(first.span(layer, a, 0, length), second.span(layer, b, 0, length), strict=True)
    )


def test_alone_and_among_sixteen(decoder: Decoder) -> None:
    prompts = {slot: tokens(length, slot) for slot, length in enumerate(LENGTHS)}
    cache, prefilled = prefill(decoder, prompts, 16)
    rows = {slot: tokens(3, 50 + slot) for slot in prompts}
    together = []
    for place in range(3):
        hidden = ascend(decoder, Draft.committed_only({slot: [row[place]] for slot, row in rows.items()}), cache)
        together.append((hidden, decoder.head(hidden)))
        cache.commit(tuple(prompts), [[0]] * 16)
    first = 0
    for slot, prompt in prompts.items():
        own, alone = prefill(decoder, {0: prompt}, 1)
        assert torch.equal(alone, prefilled[first : first + len(prompt)]), f"prefill of {len(prompt)} tokens"
        first += len(prompt)
        for place in range(3):
            hidden = ascend(decoder, Draft.committed_only({0: [rows[slot][place]]}), own)
            own.commit([0], [[0]])
            assert torch.equal(hidden[0], together[place][0][slot]), f"row {place} after {len(prompt)} tokens"
            assert torch.equal(decoder.head(hidden)[0], together[place][1][slot])
        assert same_spans(decoder, cache, slot, own, 0)


def tree(given: dict[int, list[int]], widths: tuple[int, ...], seed: int) -> Draft:
    """Children below the root, grandchildren below every child, and so on."""
    draft = Draft.committed_only(given)
    leaves = draft.last_committed()
    generator = torch.Generator().manual_seed(seed)
    for width in widths:
        draft, leaves = draft.grow(leaves, torch.randint(0, VOCAB, (len(leaves), width), generator=generator))
    return draft


def chain_hidden(decoder: Decoder, prompt: list[int], path: list[int]) -> tuple[Tensor, KVCache]:
    """The same tokens one at a time."""
    cache, _ = prefill(decoder, {0: prompt}, 1)
    hidden = []
    for token in path:
        hidden.append(ascend(decoder, Draft.committed_only({0: [token]}), cache))
        cache.commit([0], [[0]])
    return torch.cat(hidden), cache


def test_tree_nodes_are_chain_rows(decoder: Decoder) -> None:
    """Every node of three slots' trees on the way to a leaf, then an accepted path of each, then a row on top of it."""
    prompts = {1: tokens(23, 1), 0: tokens(60, 2), 3: tokens(127, 3)}
    cache, _ = prefill(decoder, prompts, 4)
    draft = tree({slot: tokens(2, 20 + slot) for slot in prompts}, (3, 2, 1), seed=5)
    hidden = ascend(decoder, draft, cache)
    slots, kept = draft.slot.tolist(), {}
    for leaf in sorted({*range(len(draft.tokens))} - {*draft.parent.tolist()}):
        path = draft.path(leaf)
        alone, _ = chain_hidden(decoder, prompts[slots[leaf]], draft.tokens[torch.tensor(path)].tolist())
        assert torch.equal(hidden[torch.tensor(path)], alone), f"leaf {leaf}"
        kept[slots[leaf]] = path  # the last of each slot, whose entries are scattered
    cache.commit(tuple(prompts), [draft.node[torch.tensor(kept[slot])].tolist() for slot in prompts])
    after = ascend(decoder, Draft.committed_only({slot: [7] for slot in prompts}), cache)
    for place, (slot, prompt) in enumerate(prompts.items()):
        alone, own = chain_hidden(decoder, prompt, [*draft.tokens[torch.tensor(kept[slot])].tolist(), 7])
        assert torch.equal(after[place], alone[-1])
        own.truncate([0], [own.lengths[0] - 1])
        assert same_spans(decoder, cache, slot, own, 0)


def test_chains_of_any_length_are_single_rows(decoder: Decoder) -> None:
    """A chain draft, alone and beside a slot that has a tree."""
    prompt = tokens(61, 1)
    cache, _ = prefill(decoder, {0: prompt, 1: tokens(9, 2)}, 2)
    path = tokens(6, 30)
    alone, _ = chain_hidden(decoder, prompt, path)
    draft = Draft.committed_only({0: path[:1]})
    for token in path[1:]:
        draft, _ = draft.grow(torch.tensor([len(draft.tokens) - 1]), torch.tensor([[token]]))
    assert torch.equal(ascend(decoder, draft, cache), alone)
    beside = Draft.committed_only({0: path, 1: [3]})
    beside, _ = beside.grow(beside.last_committed()[1:], torch.tensor([[4, 5]]))
    assert torch.equal(ascend(decoder, beside, cache)[:6], alone)


def test_chunks_of_a_prompt_do_not_see_each_other(decoder: Decoder) -> None:
    """A prompt in chunks gives the same bits whatever other prompts' chunks share the pass."""
    mine, other = tokens(50, 1), tokens(77, 2)
    spans = [(0, 20), (20, 40), (40, 50)]
    alone, beside = decoder.new_cache(1, CAPACITY), decoder.new_cache(2, CAPACITY)
    for first, stop in spans:
        a = ascend(decoder, Draft.committed_only({0: mine[first:stop]}), alone, chunk=True)
        both = Draft.committed_only({1: mine[first:stop], 0: other[first : stop + 7]})
        b = ascend(decoder, both, beside, chunk=True)
        alone.commit([0], [range(stop - first)])
        beside.commit([1], [range(stop - first)])
        beside.commit([0], [range(stop - first)])
        assert torch.equal(a, b[: stop - first])
