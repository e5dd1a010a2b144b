"""One way up: the span, the layers one by one and their parts give the same bits; deltas touch their rows only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.core.decoders import build, tokens
from tests.core.entries import all_entries
from vivace.core.attention import Attention
from vivace.core.cache import KVCache
from vivace.core.low_rank import LowRankDeltas
from vivace.core.model import Decoder
from vivace.core.seams import Draft
from vivace.core.step import Step
from vivace.kernels import fused, reference

PROMPTS = {0: tokens(21, 1), 2: tokens(5, 2), 1: tokens(70, 3)}


def filled(decoder: Decoder) -> KVCache:
    """A cache with three prompts in it."""
    cache = decoder.new_cache(4, 128)
    draft = Draft.committed_only(PROMPTS)
    step = Step.of(draft, cache, chunk=True)
    decoder.run(decoder.embed(draft.tokens, step), step)
    cache.commit(draft.slots, [range(count) for count in draft.committed])
    return cache


def next_rows(seed: int = 9) -> Draft:
    return Draft.committed_only({slot: tokens(2, seed + slot) for slot in PROMPTS})


def steps(decoder: Decoder) -> list[tuple[Tensor, Step]]:
    """Rows of every path of attention: dense, chunk, single rows."""
    dense = Step.dense(2, 17)
    chunk_draft, row_draft = Draft.committed_only(PROMPTS), next_rows()
    chunk = Step.of(chunk_draft, decoder.new_cache(4, 128), chunk=True)
    rows = Step.of(row_draft, filled(decoder))
    drafts = (torch.tensor(tokens(34)), chunk_draft.tokens, row_draft.tokens)
    return [(decoder.embed(t, s), s) for t, s in zip(drafts, (dense, chunk, rows), strict=True)]


def test_run_is_the_loop_is_the_parts(decoder: Decoder) -> None:
    for h, step in steps(decoder):
        whole = decoder.run(h, step)
        looped = h
        for layer in decoder.layers:
            looped = layer(looped, step)
        parts = h
        for layer in decoder.layers:
            q = layer.project(parts, step)
            parts = layer.feed(layer.output(parts, layer.read(q, step), step), step)
        halves = decoder.run(decoder.run(h, step, 0, 2), step, 2)
        for other in (looped, parts, halves):
            assert torch.equal(whole, other)


def test_watch_sees_every_layer(decoder: Decoder) -> None:
    h, step = steps(decoder)[0]
    seen: list[tuple[int, Tensor]] = []
    out = decoder.run(h, step, 1, watch=lambda layer, rows: seen.append((layer, rows)))
    assert [layer for layer, _ in seen] == [1, 2]
    assert torch.equal(seen[-1][1], out)


def low_rank(decoder: Decoder, which: Sequence[int], sites: Sequence[str], seed: int = 0) -> LowRankDeltas:
    """Two adapters at these sites of every layer."""
    c = decoder.config
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes = {"q": (c.width, heads), "k": (c.width, kv), "v": (c.width, kv), "o": (heads, c.width)}
    shapes |= {"gate": (c.width, c.ffn_width), "up": (c.width, c.ffn_width), "down": (c.ffn_width, c.width)}
    shapes["mlp"] = (c.width, c.width)
    generator = torch.Generator().manual_seed(seed)
    down, up = {}, {}
    for layer in range(c.num_layers):
        for site in sites:
            width, out = shapes[site]
            down[layer, site] = torch.randn(2, 4, width, generator=generator).to(decoder.dtype) * 0.2
            up[layer, site] = torch.randn(2, out, 4, generator=generator).to(decoder.dtype) * 0.2
    return LowRankDeltas(torch.tensor(list(which)), down, up)


def with_deltas(step: Step, *deltas: LowRankDeltas) -> Step:
    return replace(step, deltas=deltas)


ALL_SITES = ("q", "k", "v", "o", "gate", "up", "down", "mlp")


def test_rows_without_an_adapter_keep_their_bits(dtype: torch.dtype) -> None:
    for variant in ("plain", "sandwich", "qk_norm", "post_norm"):
        decoder = build(variant, dtype)
        draft = next_rows()
        which = [-1, 0, -1, 1, -1, 1]  # the second of each slot's two rows, which the first does not read
        bare_step = Step.of(draft, filled(decoder))
        bare = decoder.run(decoder.embed(draft.tokens, bare_step), bare_step)
        step = with_deltas(Step.of(draft, filled(decoder)), low_rank(decoder, which, ALL_SITES))
        mixed = decoder.run(decoder.embed(draft.tokens, step), step)
        untouched = torch.tensor(which) == -1
        assert torch.equal(mixed[untouched], bare[untouched])
        assert not torch.isclose(mixed[~untouched], bare[~untouched]).all(1).any()


def test_an_adapter_gives_the_same_bits_whoever_is_beside(dtype: torch.dtype) -> None:
    decoder = build("plain", dtype)
    draft = next_rows()
    for which in ([0] * 6, [0, 0, 1, 1, -1, -1], [1, -1, 1, 0, 0, 1]):
        step = with_deltas(Step.of(draft, filled(decoder)), low_rank(decoder, which, ALL_SITES))
        together = decoder.run(decoder.embed(draft.tokens, step), step)
        for place, slot in enumerate(PROMPTS):
            rows = slice(2 * place, 2 * place + 2)
            alone = Draft.committed_only({slot: draft.tokens[rows].tolist()})
            step = with_deltas(Step.of(alone, filled(decoder)), low_rank(decoder, which[rows], ALL_SITES))
            assert torch.equal(decoder.run(decoder.embed(alone.tokens, step), step), together[rows])


def test_deltas_are_low_rank_terms_on_the_projections() -> None:
    """Adding the product to the weights says the same, to rounding."""
    decoder, merged = build("plain"), build("plain")
    sites = ("q", "k", "v", "o", "gate", "up", "down")
    deltas = low_rank(decoder, [0] * 6, sites)
    c = decoder.config
    query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    for index, layer in enumerate(merged.layers):
        term = {site: deltas.up[index, site][0] @ deltas.down[index, site][0] for site in sites}
        layer.qkv.weight += torch.cat((term["q"], term["k"], term["v"]))
        layer.o.weight += term["o"]
        layer.feed_forward.up.weight += torch.cat((term["gate"], term["up"]))
        layer.feed_forward.down.weight += term["down"]
        assert layer.qkv.weight.shape[0] == query + 2 * key
    draft = next_rows()
    adapted = with_deltas(Step.of(draft, filled(decoder)), deltas)
    got = decoder.run(decoder.embed(draft.tokens, adapted), adapted)
    step = Step.of(draft, filled(decoder))
    torch.testing.assert_close(got, merged.run(merged.embed(draft.tokens, step), step), atol=1e-4, rtol=1e-4)


def test_readers_leave_the_writing_rows_alone(decoder: Decoder) -> None:
    """Rows that only read ride behind the others and change neither their bits nor what is stored."""
    draft = next_rows()
    cache, other = filled(decoder), filled(decoder)
    step = Step.of(draft, cache)
    h = decoder.embed(draft.tokens, step)
    bare = decoder.run(h, step)
    riding = Step.of(draft, other).readers(torch.tensor([1, 3, 5]))
    both = decoder.run(torch.cat((h, h[[1, 3, 5]])), riding)
    assert torch.equal(both[:6], bare)
    for layer in range(decoder.config.num_layers):
        for mine, theirs in zip(all_entries(cache, layer), all_entries(other, layer), strict=True):
            assert torch.equal(mine, theirs)
    torch.testing.assert_close(both[6:], bare[[1, 3, 5]], atol=0, rtol=0)


def test_prompts_in_one_launch_for_all_slots_read_what_they_read_slot_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a kernel attends to entries wherever they lie; in two parts, behind what was read before."""
    decoder, launched = build("windows"), list[int]()

    def attend(q: Tensor, keys: Tensor, values: Tensor, address: Tensor, visible: Tensor, scale: float) -> Tensor:
        launched.append(len(q))
        k, v = (stored[:, address].transpose(0, 1) for stored in (keys, values))
        return reference.attend_rows(q, k, v, visible, scale=scale)

    def read() -> list[Tensor]:
        cache, found = decoder.new_cache(4, 128), list[Tensor]()
        for part in ({0: tokens(21, 1), 2: tokens(5, 2)}, {0: tokens(9, 4), 1: tokens(70, 3), 2: tokens(40, 5)}):
            draft = Draft.committed_only(part)
            step = Step.of(draft, cache, chunk=True)
            found.append(decoder.run(decoder.embed(draft.tokens, step), step))
            cache.commit(draft.slots, [range(count) for count in draft.committed])
        return found

    wanted = read()
    monkeypatch.setattr(Attention, "_is_fused", lambda *_: True)
    monkeypatch.setattr(fused, "attend", attend)
    for ours, theirs in zip(read(), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert launched == [26] * 3 + [119] * 3
