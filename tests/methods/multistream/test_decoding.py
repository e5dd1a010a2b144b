"""Streams in the loop: caches, sampling, batches, packed weights."""

from __future__ import annotations

import pytest
import torch

from tests.decode.oracles import chi_square
from tests.decode.runs import finish
from tests.decode.test_sampled_text import LIKELY, SAMPLINGS, TINY, V, exact, sampled_texts
from tests.decode.tiny_decoders import build, prompts
from vivace.core.cpu.backend import pack_decoder
from vivace.core.seams import Draft
from vivace.decode.forward import ForwardPass
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.kernels.native import NativeBody
from vivace.methods.multistream.config import MultistreamConfig, StreamPlan
from vivace.methods.multistream.drafter import StreamDrafter
from vivace.methods.multistream.forward import StreamForwardPass
from vivace.methods.multistream.streams import Streams

COUNT = 14
TREE = StreamPlan((3, 2))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_main_rows_have_the_bits_they_have_without_streams(deep, streams, dtype) -> None:
    """To the bit, for a tree over a prompt."""
    model = deep(dtype)
    prompt = prompts(3, seed=6)[2]
    draft = Draft.committed_only({0: prompt[-1:]})
    draft, rows = draft.grow(draft.last_committed(), torch.tensor([[5, 6, 7]]))
    draft, _ = draft.grow(rows[:2], torch.tensor([[8, 9], [8, 9]]))
    caches = [model.new_cache(1, 64) for _ in range(2)]
    for cache in caches:
        ForwardPass().run(model, Draft.committed_only({0: prompt[:-1]}), cache, chunk=True)
        cache.commit([0], [range(len(prompt) - 1)])
    with_streams = StreamForwardPass(streams(dtype), TREE).run(model, draft, caches[0])
    alone = ForwardPass().run(model, draft, caches[1])
    assert torch.equal(with_streams.hidden, alone.hidden)
    assert with_streams.streams.shape == (8, 2, 48)


@torch.inference_mode()
@pytest.mark.parametrize("plan", [TREE, StreamPlan((2, 2), threshold=0.02), StreamPlan((3, 1), "kept")], ids=str)
def test_after_every_pass_the_cache_is_a_fresh_prefill(deep, streams, plan) -> None:
    """In every layer, for trees that keep nodes out of order and lose some on the way."""
    model = deep(torch.float32)
    drafter = StreamDrafter(model, streams(torch.float32, insertion_layer=5, noise=0.02), plan)
    session = Session(model, num_slots=1, capacity=64)
    text = [*prompts(1, seed=8)[0], 4, 8, 15]
    session.admit(Request(tuple(text), 24, drafter))
    while True:
        for emitted in session.step():
            text += emitted.tokens
        if session.is_idle:
            break
        length = session.cache.lengths[0]
        assert length == len(text) - 1
        fresh = model.new_cache(1, 64)
        ForwardPass().run(model, Draft.committed_only({0: text[:-1]}), fresh, chunk=True)
        for layer in range(6):
            for ours, theirs in zip(
                session.cache.span(layer, 0, 0, length), fresh.span(layer, 0, 0, length), strict=True
            ):
                torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("attach", ["every", "kept"])
def test_sampled_text_has_the_targets_law(attach) -> None:
    """Likeliest tokens as guesses, a draw from the target decides."""
    model = build(torch.bfloat16, vocab=V, num_layers=2, **TINY).requires_grad_(False)
    torch.manual_seed(0)
    made = Streams(MultistreamConfig(streams=2, insertion_layer=1, rank=2, bottleneck=4), model.config).requires_grad_(
        False
    )
    drafter = StreamDrafter(model, made.to(torch.bfloat16), StreamPlan((3, 2), attach))
    counts, kept = sampled_texts(model, SAMPLINGS["truncated"], drafter)
    assert chi_square(counts, exact(model, SAMPLINGS["truncated"])) > LIKELY
    assert 0.02 < kept < 0.9


@pytest.mark.parametrize(
    ("plan", "fields"), [(StreamPlan((2, 1)), {}), (StreamPlan((2, 1), "kept"), {"feedback": True})], ids=str
)
def test_a_batch_says_what_each_says_alone(deep, streams, plan, fields) -> None:
    """With requests that join while others run, and slots used again."""
    model = deep(torch.bfloat16)
    drafter = StreamDrafter(model, streams(torch.bfloat16, insertion_layer=5, noise=0.02, **fields), plan)
    asked = prompts(5, seed=9)
    alone = [finish(Session(model, num_slots=1, capacity=64), [Request(p, COUNT, drafter)])[0] for p in asked]
    session = Session(model, num_slots=3, capacity=64)
    together = finish(session, [Request(p, COUNT, drafter) for p in asked], every=2)
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert sum(r.stats.num_accepted_draft_tokens for r in together) > 0
    assert [r.stats.num_accepted_draft_tokens for r in together] == [r.stats.num_accepted_draft_tokens for r in alone]


@pytest.mark.parametrize(
    ("plan", "fields"),
    [
        (StreamPlan((1, 1, 1)), {}),
        (StreamPlan((2, 2), "kept"), {}),
        (StreamPlan((3, 1), threshold=0.01), {}),
        (StreamPlan((2, 1), "kept"), {"feedback": True}),
        (StreamPlan((2, 1), "kept", weights="q4"), {"feedback": True}),
        (StreamPlan((1, 1), "kept", weights="int8"), {}),
    ],
    ids=str,
)
def test_native_spans_give_text_and_probabilities_of_plain_decoding(body: NativeBody, streams, plan, fields) -> None:
    model = build(torch.bfloat16, num_layers=6, seed=3).requires_grad_(False)
    pack_decoder(model, body)

    def run(drafter, slots: int):
        requests = [Request(prompt, COUNT, drafter, logprobs=True) for prompt in prompts(4, seed=2)]
        return finish(Session(model, num_slots=slots, capacity=64, chunk=8), requests)

    plain = run(NoDrafts(), 1)
    drafter = StreamDrafter(model, streams(torch.bfloat16, insertion_layer=4, noise=0.02, **fields), plan)
    for slots in (4, 1):
        found = run(drafter, slots)
        assert [r.tokens for r in found] == [r.tokens for r in plain]
        assert [r.logprobs for r in found] == [r.logprobs for r in plain]
