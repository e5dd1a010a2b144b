"""Streams never change the text: notes S1, S2, S7, S12, S14."""

from __future__ import annotations

import pytest
import torch

from tests.decode.oracles import plain_text
from tests.decode.runs import finish
from tests.decode.tiny_decoders import prompts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.multistream.config import StreamPlan
from vivace.multistream.drafter import StreamDrafter

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


@pytest.fixture(scope="module")
def texts(deep):
    """What plain decoding makes of three prompts, by precision."""
    return {
        dtype: [plain_text(deep(dtype), prompt, COUNT) for prompt in prompts(3, seed=2)]
        for dtype in (torch.float32, torch.bfloat16)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{'-'.join(map(str, p.widths))}-{p.attach}-{p.threshold:g}")
def test_greedy_text_is_plain_decoding_token_for_token(deep, streams, texts, dtype, plan) -> None:
    model = deep(dtype)
    for insertion in (1, 4):
        drafter = StreamDrafter(model, streams(dtype, insertion=insertion), plan)
        session = Session(model, num_slots=2, capacity=64, chunk=8)
        found = finish(session, [Request(t.prompt, COUNT, drafter) for t in texts[dtype]])
        for result, text in zip(found, texts[dtype], strict=True):
            assert result.tokens == text.new
            stats = result.stats
            assert stats.num_tokens <= stats.num_accepted_draft_tokens + stats.num_spec_steps
            assert max([0, *[i + 1 for i, n in enumerate(stats.accepted_per_position) if n]]) <= len(plan.widths)
