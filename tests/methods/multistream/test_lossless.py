"""Streams never change the text, whatever their plan."""

from __future__ import annotations

import pytest
import torch

from tests.decode.oracles import plain_text
from tests.decode.runs import finish
from tests.decode.tiny_decoders import prompts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.methods.multistream.config import StreamPlan
from vivace.methods.multistream.drafter import StreamDrafter

COUNT = 14
PLANS = [
    StreamPlan(widths, attach, threshold)
    for widths, attach, threshold in (
        ((1,), "every", 0.0),
        ((1, 1), "kept", 0.0),
        ((1, 1, 1), "every", 0.0),
        ((1, 1, 1, 1), "every", 0.0),
        ((1, 1, 1, 1), "kept", 0.0),
        ((2, 2), "every", 0.01),
        ((2, 2, 1), "kept", 0.0),
        ((3, 1, 1), "every", 0.0),
        ((3, 2), "every", 0.1),
        ((4, 1), "every", 0.99),
        ((4, 4), "kept", 0.0),
        ((2, 2, 2, 2), "kept", 0.01),
    )
]
ON_FLOAT32 = [StreamPlan((1, 1), "kept"), StreamPlan((3, 2), "every", 0.1), StreamPlan((2, 2, 1), "kept")]
"""Of these: sums of rows differ between precisions, how streams draft and are kept does not."""


@pytest.fixture(scope="module")
def texts(deep):
    """What plain decoding makes of three prompts, by precision."""
    return {
        dtype: [plain_text(deep(dtype), prompt, COUNT) for prompt in prompts(3, seed=2)]
        for dtype in (torch.float32, torch.bfloat16)
    }


@pytest.mark.parametrize("plan", [PLANS[1], PLANS[6], PLANS[8]], ids=lambda p: f"{'-'.join(map(str, p.widths))}")
def test_a_pass_says_what_was_accepted_and_one_token_more(deep, streams, texts, plan) -> None:
    """At least one token, at most one for every stream and the one that corrects or follows them."""
    drafter = StreamDrafter(deep(torch.bfloat16), streams(torch.bfloat16, insertion_layer=5, noise=0.02), plan)
    session = Session(deep(torch.bfloat16), num_slots=1, capacity=64)
    session.admit(Request(texts[torch.bfloat16][0].prompt, COUNT, drafter))
    accepted, passes, counts = 0, 0, []
    while not session.is_idle:
        for emitted in session.step():
            stats = emitted.stats
            new = stats.num_accepted_draft_tokens - accepted
            assert 0 <= new <= len(plan.widths)
            assert 1 <= len(emitted.tokens) <= new + 1
            assert len(emitted.tokens) == new + 1 or emitted.finish_reason is not None
            accepted, passes = stats.num_accepted_draft_tokens, passes + 1
            counts.append(len(emitted.tokens))
    assert sum(counts) == COUNT
    assert stats.num_tokens == COUNT
    assert passes == len(counts)


@pytest.mark.slow_where(lambda dtype, plan: dtype == torch.float32 and plan not in ON_FLOAT32)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{'-'.join(map(str, p.widths))}-{p.attach}-{p.threshold:g}")
def test_greedy_text_is_plain_decoding_token_for_token(deep, streams, texts, dtype, plan) -> None:
    model = deep(dtype)
    for insertion in (1, 4):
        drafter = StreamDrafter(model, streams(dtype, insertion_layer=insertion), plan)
        session = Session(model, num_slots=2, capacity=64, chunk=8)
        found = finish(session, [Request(t.prompt, COUNT, drafter) for t in texts[dtype]])
        for result, text in zip(found, texts[dtype], strict=True):
            assert result.tokens == text.new
            stats = result.stats
            assert stats.num_tokens <= stats.num_accepted_draft_tokens + stats.num_spec_steps
            assert max([0, *[i + 1 for i, n in enumerate(stats.accepted_per_position) if n]]) <= len(plan.widths)
