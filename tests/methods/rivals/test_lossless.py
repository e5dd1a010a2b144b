"""Rivals that draft never change the text, greedy or sampled, alone or among sixteen that come and go."""

from __future__ import annotations

import pytest
import torch

from tests.decode.oracles import chi_square, plain_text
from tests.decode.runs import finish
from tests.decode.test_sampled_text import LIKELY, SAMPLINGS, TINY, V, exact, sampled_texts
from tests.decode.tiny_decoders import prompts
from tests.methods.rivals.conftest import RIVALS, rival
from vivace.decode.request import Request
from vivace.decode.session import Session

COUNT = 18
LIMITS = [1 + (5 * place) % COUNT for place in range(9)]
DTYPES = [torch.float32, torch.bfloat16]
ON_FLOAT32 = ("medusa tree", "eagle tree", "deed chain", "uno sparse", "layerskip", "lookahead")
"""One of each method; their other shapes differ in no sum of a row."""


@pytest.fixture(scope="module")
def texts(base):
    """What plain decoding makes of nine prompts, by precision."""
    return {dtype: [plain_text(base(dtype), prompt, COUNT) for prompt in prompts(9, seed=2)] for dtype in DTYPES}


@pytest.mark.slow_where(lambda dtype, name: dtype == torch.float32 and name not in ON_FLOAT32)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", RIVALS)
def test_greedy_text_is_plain_decoding_token_for_token(base, texts, dtype, name) -> None:
    drafter = rival(name, base(dtype))
    session = Session(base(dtype), num_slots=4, capacity=64, chunk=8)
    requests = [Request(t.prompt, n, drafter) for t, n in zip(texts[dtype], LIMITS, strict=True)]
    drafted = 0
    for result, text, count in zip(finish(session, requests, every=2), texts[dtype], LIMITS, strict=True):
        assert result.tokens == text.new[:count]
        drafted += result.stats.num_draft_tokens
    assert drafted > 40


@pytest.mark.slow_where(lambda name: name not in ("eagle chain", *ON_FLOAT32))
@pytest.mark.parametrize("name", RIVALS)
def test_slots_leave_nothing_behind(base, texts, name) -> None:
    """Answers do not depend on who sat in the slot before, nor on requests that were cancelled."""
    model = base(torch.bfloat16)
    drafter = rival(name, model)
    session = Session(model, num_slots=1, capacity=64, chunk=8)
    runs = []
    for _ in range(2):
        cancelled = session.admit(Request(texts[torch.bfloat16][3].prompt, COUNT, drafter))
        for _ in range(3):
            session.step()
        drafting = session.drafting(drafter)
        session.cancel(cancelled)
        for memory in ("_kept", "_pending", "_memory", "_offsets"):
            assert not getattr(drafting, memory, {})
        [result] = finish(session, [Request(texts[torch.bfloat16][4].prompt, COUNT, drafter)])
        assert result.tokens == texts[torch.bfloat16][4].new
        runs.append(result.stats.num_accepted_draft_tokens)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("medusa tree", "truncated"),
        ("eagle chain", "penalised"),
        ("deed chain", "temperature"),
        ("lookahead", "truncated"),
    ],
)
def test_the_law_is_the_targets(base, name, sampling) -> None:
    model = base(torch.bfloat16, vocab=V, num_layers=3, **TINY)
    counts, kept = sampled_texts(model, SAMPLINGS[sampling], rival(name, model))
    assert chi_square(counts, exact(model, SAMPLINGS[sampling])) > LIKELY
    assert kept > 0.02
