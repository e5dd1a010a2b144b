"""Chains drafted in one native call: to the bit what the steps one by one give, and the text of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.entries import all_entries
from tests.core.test_bits import prefill
from tests.decode.runs import Result, finish
from tests.decode.steps_at_once import MODELS, Noting, packed, stops_at_every_end
from tests.decode.tiny_decoders import prompts
from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.core.seams import Context, Draft, Drafter
from vivace.decode.distributions import Distributions
from vivace.decode.lookup import LookupConfig, PromptLookup
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request, StopRule
from vivace.decode.session import Session
from vivace.decode.shallow import DraftPlan, ShallowDrafter
from vivace.kernels.low_bit import Weights
from vivace.kernels.native import NativeBody
from vivace.methods.multirate.drafter import self_speculation
from vivace.methods.multirate.residual import Accelerator

GATE = 3
TEXTS = {2: prompts(3, seed=4)[0] + (4, 8, 15), 0: (5,), 3: tuple(range(1, 70))}
"""Prompts of several lengths by slot; the last token of each is the root."""
LIMITS = {2: 4, 0: 1, 3: 0}

Accelerators = Callable[..., Accelerator]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, body: NativeBody) -> Decoder:
    return packed(request.param, body)


@pytest.fixture
def chains(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    """Drafts that are made in one call from now on."""
    made: list[Draft] = []
    chain = model.backend.chain
    assert chain is not None
    draft = chain.draft

    def noting(*given: Any) -> Draft:
        made.append(draft(*given))
        return made[-1]

    monkeypatch.setattr(chain, "draft", noting)
    return made


def verified_here(drafter: Noting) -> list[int]:
    """Drafts that it left to the session to verify, by identity."""
    return [id(each) for each in drafter.proposed if isinstance(each, Draft)]


def drafted(
    model: Decoder, drafter: ShallowDrafter, *, at_once: bool, offsets: Mapping[int, Tensor] | None = None
) -> tuple[Draft, KVCache]:
    """A draft over freshly stored prompts, from what verification left in some slots, and the cache it wrote to."""
    cache, _ = prefill(model, {slot: list(text[:-1]) for slot, text in TEXTS.items() if len(text) > 1}, 4)
    tokens = {slot: list(text) for slot, text in TEXTS.items()}
    requests = {slot: Request(text, 9, drafter) for slot, text in TEXTS.items()}
    distributions = Distributions(requests, tokens, cache.lengths)
    generators = {slot: torch.Generator() for slot in TEXTS}
    context = Context(tuple(TEXTS), tokens, cache, distributions, LIMITS, generators)
    drafting = drafter.open(cache)
    drafting._offsets.update(offsets or {})
    with pytest.MonkeyPatch.context() as patch:
        if not at_once:
            patch.setattr(model.backend, "chain", None)
        return drafting.propose(context), cache


def assert_same(ours: tuple[Draft, KVCache], theirs: tuple[Draft, KVCache]) -> None:
    (draft, cache), (other, stored) = ours, theirs
    assert (draft.slots, draft.committed, draft.entry_layer) == (other.slots, other.committed, other.entry_layer)
    for name in ("tokens", "slot", "node", "parent", "hidden"):
        assert torch.equal(getattr(draft, name), getattr(other, name)), name
    for layer in range(GATE):
        for mine, yours in zip(all_entries(cache, layer), all_entries(stored, layer), strict=True):
            assert torch.equal(mine, yours)


@pytest.mark.parametrize("mode", ["delta", "lite"])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("threads", [1])
@torch.inference_mode()
def test_chain_and_steps_are_one_to_the_bit(
    model: Decoder, accelerator: Accelerators, mode: str, feedback: bool, threads: int
) -> None:
    """Ragged sequences with limits of their own; offsets that differ by slot and depth, one slot without any."""
    torch.set_num_threads(threads)
    fast = accelerator(torch.bfloat16, noise=0.3, mode=mode, feedback=feedback, exit_layer=GATE)
    drafter = self_speculation(model, fast, DraftPlan.chain(5))
    offsets = {slot: torch.randn(3, 48).bfloat16() for slot in (2, 3)} if feedback else {}
    steps = drafted(model, drafter, at_once=False, offsets=offsets)
    assert steps[0].node.tolist() == [0, 0, 0, 1, 1, 2, 3, 4]
    assert_same(drafted(model, drafter, at_once=True, offsets=offsets), steps)


@pytest.mark.parametrize("reach", [(4,), (5, 3), (3, 4, 5)])
@torch.inference_mode()
def test_chains_read_deep_layers_as_steps_do(model: Decoder, accelerator: Accelerators, reach: tuple[int, ...]) -> None:
    """A root with nothing verified before it among them; projections of the reach may differ in the last bit."""
    fast = accelerator(torch.bfloat16, noise=0.3, exit_layer=GATE, reach=reach)
    drafter = self_speculation(model, fast, DraftPlan.chain(5))
    steps = drafted(model, drafter, at_once=False)
    assert_same(drafted(model, drafter, at_once=True), steps)
    without = self_speculation(model, accelerator(torch.bfloat16, noise=0.3, exit_layer=GATE), DraftPlan.chain(5))
    assert not torch.equal(drafted(model, without, at_once=True)[0].tokens, steps[0].tokens)


@torch.inference_mode()
def test_unsure_guesses_end_their_chains_alike(model: Decoder, accelerator: Accelerators) -> None:
    """For a range of thresholds, both ways of drafting stop every chain at the same guess."""
    fast = accelerator(torch.bfloat16, noise=0.1, exit_layer=GATE)
    counts = set()
    for percent in range(2, 60, 6):
        plan = DraftPlan((1,) * 4, min_confidence=percent / 100)
        drafter = self_speculation(model, fast, plan)
        ours, theirs = (drafted(model, drafter, at_once=at_once) for at_once in (True, False))
        assert_same(ours, theirs)
        counts.add(len(ours[0].tokens))
    assert len(counts) > 1, "some thresholds stop earlier than others"


def run(
    model: Decoder,
    drafter: Drafter,
    slots: int,
    every: int = 0,
    row_count: int = 1,
    steps_per_call: int | None = None,
    **fields: object,
) -> list[Result]:
    requests = [Request(prompt, 5 + 3 * i, drafter, **fields) for i, prompt in enumerate(prompts(6, seed=2))]
    session = Session(model, num_slots=slots, capacity=64, chunk=8, row_count=row_count, steps_per_call=steps_per_call)
    return finish(session, requests, every=every)


@pytest.mark.parametrize("min_confidence", [0.0, 0.1])
@pytest.mark.parametrize("feedback", [False, True])
def test_text_of_plain_decoding(
    model: Decoder, accelerator: Accelerators, chains: list[Draft], min_confidence: float, feedback: bool
) -> None:
    """While sequences join and leave; rejected guesses leave entries behind that nobody reads."""
    plain = run(model, NoDrafts(), slots=1, logprobs=True)
    accepted = drafts = 0
    for gate, noise in ((3, 0.3), (5, 0.0)):
        fast = accelerator(torch.bfloat16, noise=noise, exit_layer=gate, feedback=feedback)
        drafter = Noting(self_speculation(model, fast, DraftPlan((1,) * 4, min_confidence=min_confidence)))
        for slots, every in ((1, 0), (2, 0), (6, 2)):
            found = run(model, drafter, slots, every, logprobs=True)
            assert [r.tokens for r in found] == [r.tokens for r in plain]
            assert [r.logprobs for r in found] == [r.logprobs for r in plain]
            accepted += sum(r.stats.num_accepted_draft_tokens for r in found)
            drafts += sum(r.stats.num_draft_tokens for r in found)
        assert verified_here(drafter) == [id(chain) for chain in chains] != []
        chains.clear()
    assert 0 < accepted < drafts, "some guesses are kept and some are not"


@pytest.mark.slow_where(lambda weights, reach, **_: (weights == "q4") != bool(reach))
@pytest.mark.parametrize("weights", ["int8", "q4"])
@pytest.mark.parametrize("reach", [(), (5, 4)])
def test_rough_drafts_leave_no_trace(
    model: Decoder, accelerator: Accelerators, chains: list[Draft], weights: Weights, reach: tuple[int, ...]
) -> None:
    """Copies in few bits guess; what they stored is written again, so text and its log p are plain decoding's."""
    plain = run(model, NoDrafts(), slots=1, logprobs=True)
    kept = {}
    for kind in ("bf16", weights):
        fast = accelerator(torch.bfloat16, exit_layer=5, feedback=True, reach=reach)
        plan = DraftPlan((1,) * 4, weights=kind)
        assert (drafted(model, self_speculation(model, fast, plan), at_once=True)[0].hidden is None) == (kind != "bf16")
        chains.clear()
        drafter = Noting(self_speculation(model, fast, plan))
        for slots, every in ((1, 0), (6, 2)):
            found = run(model, drafter, slots, every, logprobs=True)
            assert [r.tokens for r in found] == [r.tokens for r in plain]
            assert [r.logprobs for r in found] == [r.logprobs for r in plain]
        assert verified_here(drafter) == [id(chain) for chain in chains] != []
        kept[kind] = sum(r.stats.num_accepted_draft_tokens for r in found)
    assert kept[weights] > 0.5 * kept["bf16"] > 0, "rounding costs some guesses, not most"


def test_a_stop_inside_a_chain_cuts_like_plain_decoding(
    model: Decoder, accelerator: Accelerators, chains: list[Draft]
) -> None:
    prompt = prompts(6, seed=2)[1]
    drafter = Noting(self_speculation(model, accelerator(torch.bfloat16, exit_layer=5), DraftPlan.chain(4)))
    session = Session(model, num_slots=1, capacity=64, chunk=8, steps_per_call=0)
    [plain] = finish(session, [Request(prompt, 21, NoDrafts())])
    session.admit(Request(prompt, 21, drafter))
    lasts = set(accumulate(len(emitted.tokens) for emitted in session.drain()))
    assert any(plain.tokens.index(end) + 1 not in lasts for end in plain.tokens), "some ends lie inside a chain"
    for place, end in enumerate(plain.tokens):
        stop = StopRule(end_tokens=frozenset([end]))
        [result] = finish(session, [Request(prompt, 21, drafter, stop=stop)])
        assert result.tokens == plain.tokens[: plain.tokens.index(end) + 1], place
        stats = result.stats
        assert stats.num_accepted_draft_tokens + stats.num_spec_steps == len(result.tokens)
        assert not session.cache.lengths[0]
    assert verified_here(drafter) == [id(chain) for chain in chains] != []


PLANS = {
    "exact": (DraftPlan.chain(4), {}),
    "feedback": (DraftPlan.chain(4), {"feedback": True}),
    "rough, reaching": (DraftPlan((1,) * 3, weights="q4"), {"feedback": True, "reach": (5, 4)}),
    "unsure": (DraftPlan((1,) * 4, min_confidence=0.2), {"feedback": True}),
}


@pytest.mark.slow_where(lambda noise, logprobs, **_: logprobs != (noise > 0))
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("logprobs", [False, True])
def test_steps_in_one_call_are_the_steps_one_by_one(
    model: Decoder,
    accelerator: Accelerators,
    name: str,
    noise: float,
    logprobs: bool,
) -> None:
    """Text, log p and what was drafted and kept where; who wants to see guesses is answered step by step."""
    plan, fields = PLANS[name]
    drafter = Noting(self_speculation(model, accelerator(torch.bfloat16, noise=noise, exit_layer=5, **fields), plan))
    found = run(model, drafter, slots=1, steps_per_call=4, logprobs=logprobs)
    assert max(drafter.steps) > 1
    drafter.proposed.clear()
    alone = run(model, drafter, slots=1, steps_per_call=0, logprobs=logprobs)
    assert drafter.proposed
    assert not drafter.steps
    for mine, yours in zip(found, alone, strict=True):
        assert (mine.tokens, mine.logprobs, mine.reason) == (yours.tokens, yours.logprobs, yours.reason)
        for counted in ("num_spec_steps", "num_draft_tokens", "accepted_per_position", "drafted_per_position"):
            assert getattr(mine.stats, counted) == getattr(yours.stats, counted), counted
    assert sum(r.stats.num_accepted_draft_tokens for r in found) > 0


def test_every_end_stops_the_steps(model: Decoder, accelerator: Accelerators) -> None:
    fast = accelerator(torch.bfloat16, exit_layer=5, feedback=True)
    stops_at_every_end(model, Noting(self_speculation(model, fast, DraftPlan.chain(3))))


def test_who_wants_to_see_guesses_goes_step_by_step(model: Decoder, accelerator: Accelerators) -> None:
    drafter = Noting(self_speculation(model, accelerator(torch.bfloat16, exit_layer=5), DraftPlan.chain(3)))
    session = Session(model, num_slots=1, capacity=64, chunk=8)
    session.admit(Request(prompts(6, seed=2)[1], 21, drafter, shows_guesses=True))
    assert any(guesses for emitted in session.drain() for guesses in emitted.guesses)
    assert drafter.proposed
    assert not drafter.steps


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(do_sample=True, temperature=0.8),
        Sampling(do_sample=True, top_p=0.9, repetition_penalty=1.3),
        Sampling(repetition_penalty=1.2),
    ],
    ids=["drawn", "truncated and penalised", "penalised"],
)
def test_sampled_text_is_that_of_the_same_seed_without_drafts(
    model: Decoder, accelerator: Accelerators, chains: list[Draft], sampling: Sampling
) -> None:
    """Guesses change no token: it takes the noise of its position, or with processors one number of its generator."""
    fast = accelerator(torch.bfloat16, exit_layer=5)
    plain = run(model, NoDrafts(), 1, sampling=sampling, seed=7, logprobs=True)
    accepted = 0
    for slots, every in ((1, 0), (6, 2)):
        drafter = Noting(self_speculation(model, fast, DraftPlan.chain(3)))
        found = run(model, drafter, slots, every, sampling=sampling, seed=7)
        assert [r.tokens for r in found] == [r.tokens for r in plain]
        accepted += sum(r.stats.num_accepted_draft_tokens for r in found)
        assert verified_here(drafter) == [id(chain) for chain in chains]
        assert chains or drafter.steps
        assert not (drafter.steps and sampling.reads_prefix)
        chains.clear()
    assert accepted > 0
    others = run(model, NoDrafts(), 1, sampling=sampling, seed=8)
    assert sampling.do_sample == ([r.tokens for r in others] != [r.tokens for r in plain])


def test_who_goes_step_by_step(model: Decoder, accelerator: Accelerators, chains: list[Draft]) -> None:
    """Trees and padded calls; a text that repeats itself is looked up."""
    fast = accelerator(torch.bfloat16, exit_layer=GATE)
    chain = self_speculation(model, fast, DraftPlan.chain(3))
    run(model, self_speculation(model, fast, DraftPlan((2, 1))), 2)
    run(model, chain, 2, row_count=8)
    assert not chains
    plain = run(model, NoDrafts(), 2)
    lookup = PromptLookup(LookupConfig(num_draft_tokens=3, min_ngram=1))
    drafter = Noting(self_speculation(model, fast, DraftPlan.chain(3), lookup=lookup))
    found = run(model, drafter, 2)
    assert [r.tokens for r in found] == [r.tokens for r in plain]
    assert 0 < len(chains) < len(verified_here(drafter)), "chains where nothing is known, steps where some is"
