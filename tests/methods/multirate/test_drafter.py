"""Self-speculation is lossless whatever the accelerator says, and leaves the cache that plain decoding leaves."""

from __future__ import annotations

import pytest
import torch

from tests.decode.oracles import plain_text
from tests.decode.runs import finish
from tests.decode.tiny_decoders import prompts
from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Context, Draft, Drafter
from vivace.core.step import Step
from vivace.decode.distributions import Distributions
from vivace.decode.forward import ForwardPass
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.decode.shallow import DraftPlan
from vivace.methods.multirate.drafter import self_speculation

COUNT = 13
CHAINS = [(1, 1), (1, 8), (2, 3), (3, 2), (3, 5), (4, 4), (4, 7), (5, 6), (5, 8)]
"""Every gate of six layers, every length up to eight, as (gate, guesses)."""
PLANS = [*((gate, (1,) * length) for gate, length in CHAINS), (2, (2, 1, 1)), (3, (3, 2, 1)), (5, (3, 2, 1))]
"""(gate, widths)"""
ON_FLOAT32 = [(3, (1,) * 5), (5, (1,) * 8), (5, (3, 2, 1))]
"""Of these: sums of rows differ between precisions, how rows are drafted and kept does not."""


@pytest.fixture(scope="module")
def texts(deep):
    """What plain decoding makes of three prompts, by precision."""
    return {
        dtype: [plain_text(deep(dtype), prompt, COUNT) for prompt in prompts(3, seed=2)]
        for dtype in (torch.float32, torch.bfloat16)
    }


@pytest.mark.slow_where(lambda dtype, gate, widths: dtype == torch.float32 and (gate, widths) not in ON_FLOAT32)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("gate", "widths"), PLANS, ids=str)
def test_greedy_text_is_plain_decoding_token_for_token(deep, accelerator, texts, dtype, widths, gate) -> None:
    model = deep(dtype)
    accepted = 0
    for noise, mode, feedback in ((0.0, "delta", False), (0.3, "lite", False), (0.05, "delta", True)):
        fast = accelerator(dtype, noise=noise, mode=mode, feedback=feedback, exit_layer=gate)
        drafter = self_speculation(model, fast, DraftPlan(widths))
        session = Session(model, num_slots=3, capacity=64, chunk=8)
        found = finish(session, [Request(t.prompt, COUNT, drafter) for t in texts[dtype]])
        for result, text in zip(found, texts[dtype], strict=True):
            assert result.tokens == text.new
            accepted += result.stats.num_accepted_draft_tokens
    if gate == 5:
        assert accepted > 0, "a gate next to the top guesses right now and then"


@torch.inference_mode()
def draft_behind(model: Decoder, drafter: Drafter, text: tuple[int, ...]) -> tuple[Draft, KVCache]:
    """A draft behind a text that slots 0 and 1 have stored, and the cache."""
    cache = model.new_cache(2, 64)
    for slot in (0, 1):
        prompt = Draft.committed_only({slot: list(text[:-1])})
        ForwardPass().run(model, prompt, cache, chunk=True)
        cache.commit([slot], [range(len(text) - 1)])
    distribution = Distributions({0: Request(text, 9, drafter)}, {0: text}, cache.lengths)
    return drafter.open(cache).propose(Context((0,), {0: text}, cache, distribution)), cache


@torch.inference_mode()
def test_a_row_of_a_tree_sees_its_ancestors_and_stands_at_its_depth(deep, accelerator) -> None:
    """What comes out at the top of a row is what a chain of its own path gives behind the same text."""
    model, text = deep(torch.float32), (3, 1, 4, 1, 5)
    drafter = self_speculation(model, accelerator(torch.float32, exit_layer=5), DraftPlan((3, 2, 1)))
    tree, cache = draft_behind(model, drafter, text)
    assert Step.of(tree, cache).position.tolist() == [len(text) - 1 + depth for depth in tree.depths]
    top = ForwardPass().run(model, tree, cache).hidden
    for row in range(len(tree.tokens)):
        alone = Draft.committed_only({1: [int(tree.tokens[r]) for r in tree.path(row)]})
        assert torch.allclose(top[row], ForwardPass().run(model, alone, cache).hidden[-1], atol=1e-5)


def test_a_tree_of_one_child_a_node_is_a_chain(deep, accelerator, monkeypatch) -> None:
    model, fast = deep(torch.float32), accelerator(torch.float32, exit_layer=5)
    chain, _ = draft_behind(model, self_speculation(model, fast, DraftPlan.chain(4)), (3, 1, 4))
    monkeypatch.setattr(DraftPlan, "is_chain", False)
    tree, _ = draft_behind(model, self_speculation(model, fast, DraftPlan((1,) * 4, 1e-9)), (3, 1, 4))
    assert tree.lists == chain.lists
    assert torch.equal(tree.hidden, chain.hidden)


@torch.inference_mode()
def test_after_every_cycle_the_cache_is_a_fresh_prefill(deep, accelerator) -> None:
    """The cache is that of plain decoding in every layer, also for a tree that keeps nodes out of order."""
    model = deep(torch.float32)
    drafter = self_speculation(model, accelerator(torch.float32, exit_layer=5), DraftPlan((3, 2, 1)))
    prompt = prompts(1, seed=8)[0] + (4, 8, 15)
    session = Session(model, num_slots=1, capacity=64)
    session.admit(Request(prompt, 21, drafter))
    text, cycles = list(prompt), 0
    while not session.is_idle:
        for emitted in session.step():
            text += emitted.tokens
        length = session.cache.lengths[0]
        if session.is_idle:
            break
        assert length == len(text) - 1
        plain_cache = Session(model, num_slots=1, capacity=64, chunk=64)
        plain_cache.admit(Request(tuple(text), 1, drafter))
        plain_cache._fill_slots()
        plain_cache._prefill(list(plain_cache._live.values()))
        for layer in range(6):
            for ours, fresh in zip(
                session.cache.span(layer, 0, 0, length), plain_cache.cache.span(layer, 0, 0, length), strict=True
            ):
                torch.testing.assert_close(ours, fresh, atol=2e-4, rtol=2e-4)
        cycles += 1
    assert cycles >= 5


@torch.inference_mode()
def test_lower_layers_run_once_for_every_node(deep, accelerator, monkeypatch) -> None:
    """Verification starts at the gate with what drafting computed."""
    model = deep(torch.bfloat16)
    spans = []
    run = type(model).run

    def recorded(self, h, step, start=0, stop=None, **rest):
        spans.append((start, stop, len(h)))
        return run(self, h, step, start, stop, **rest)

    monkeypatch.setattr(type(model), "run", recorded)
    drafter = self_speculation(model, accelerator(torch.bfloat16), DraftPlan.chain(3))
    session = Session(model, num_slots=1, capacity=64)
    session.admit(Request((5,), 10, drafter))
    session.step()
    lower, upper = [s for s in spans if s[1] == 3], [s for s in spans if s[0] == 3]
    assert [rows for *_, rows in lower] == [2, 2, 2, 1], "slow and accelerated row, and the last guess alone"
    assert [rows for *_, rows in upper] == [4]


def test_drafts_stop_at_the_token_limit_and_below_unsure_guesses(deep, accelerator) -> None:
    model = deep(torch.bfloat16)
    fast = accelerator(torch.bfloat16)
    session = Session(model, num_slots=1, capacity=64)
    [result] = finish(session, [Request((5, 6), 1, self_speculation(model, fast, DraftPlan.chain(6)))])
    assert result.stats.num_draft_tokens == 0
    session = Session(model, num_slots=1, capacity=64)
    plan = DraftPlan((1,) * 6, min_confidence=0.999)
    [result] = finish(session, [Request((5, 6), 12, self_speculation(model, fast, plan))])
    assert len(result.tokens) == 12
    assert result.stats.num_draft_tokens < 6 * result.stats.num_spec_steps
