"""Plain decoding with several tokens in one native call: the text, log p and counts of one call a token."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.decode.runs import Result, finish
from tests.decode.steps_at_once import Noting
from tests.decode.tiny_decoders import VOCAB, build, prompts
from vivace.core.config import MoeConfig
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.core.seams import Decided, Drafter
from vivace.decode.multi_step import MAX_TOKENS, MultiStepPlain, StepBudget
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request, StopRule
from vivace.decode.session import Session
from vivace.kernels.low_bit import Weights
from vivace.kernels.native import NativeBody
from vivace.methods.auto.drafter import Adaptive
from vivace.methods.auto.regime import Regime

PROMPTS = prompts(6, seed=2)
FIELDS = {
    "tied": {},
    "own head, scaled": {"tied_head": False, "embedding_scale": 3.7, "norm_offset": 1.0},
    "norms after": {"norm_placement": "post", "qk_norm": "full", "qkv_clip": 1.5},
    "norms around": {"norm_placement": "sandwich", "qk_norm": "head", "windows": (9, None, 5), "num_kv_heads": 1},
    "learned": {"positions": "learned", "position_offset": 2, "norm": "layer", "gated": False, "activation": "relu"},
    "experts": {"moe": MoeConfig(5, 2, 20, True), "moe_layers": (True, False, True)},
    "capped": {"logit_softcap": 5.0, "attention_softcap": 2.0},
}


@pytest.fixture(params=FIELDS)
def model(request: pytest.FixtureRequest, body: NativeBody) -> Decoder:
    return packed(body, **FIELDS[request.param])


def packed(body: NativeBody, weights: Weights = "bf16", **fields: object) -> Decoder:
    made = build(torch.bfloat16, num_layers=3, seed=3, **fields).requires_grad_(False)
    pack_decoder(made, body, weights)
    return made


class Steady:
    """A clock on which every look costs the same, so that passes seem to take no time."""

    def __init__(self, tick: float = 1e-6) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def ahead(model: Decoder) -> Noting:
    """Plain decoding on a model whose passes seem to take no time."""
    return Noting(MultiStepPlain(model, clock=Steady()))


def run(
    model: Decoder, drafter: Drafter, slots: int = 1, every: int = 0, row_count: int = 1, **fields: object
) -> list[Result]:
    requests = [Request(prompt, 5 + 3 * i, drafter, **fields) for i, prompt in enumerate(PROMPTS)]
    session = Session(model, num_slots=slots, capacity=64, chunk=8, row_count=row_count)
    return finish(session, requests, every=every)


def assert_same(ours: list[Result], theirs: list[Result]) -> None:
    for name in ("tokens", "logprobs", "reason"):
        assert [getattr(r, name) for r in ours] == [getattr(r, name) for r in theirs], name
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine.stats.num_spec_steps == yours.stats.num_spec_steps == len(mine.tokens)
        assert mine.stats.mean_acceptance_length == mine.stats.tokens_per_target_pass == 1
        assert mine.stats.num_draft_tokens == 0


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize(("slots", "every"), [(1, 0), (2, 0), (6, 2)])
def test_text_of_one_call_a_token(model: Decoder, slots: int, every: int, logprobs: bool) -> None:
    """Alone, ragged, and while sequences join and leave."""
    drafter = ahead(model)
    found = run(model, drafter, slots, every, logprobs=logprobs)
    assert_same(found, run(model, NoDrafts(), slots, every, logprobs=logprobs))
    assert max(max(given) for given in drafter.rows) == MAX_TOKENS
    assert drafter.rows[0] == (1,) * len(drafter.rows[0]), "the first token of a text comes alone"


@pytest.mark.parametrize("slots", [1, 6])
def test_logits_that_capping_makes_equal_are_left_to_the_session(body: NativeBody, slots: int) -> None:
    """Then the first of several tokens wins, and not the one with the largest logit before capping."""
    model = packed(body, logit_softcap=0.4)
    drafter = ahead(model)
    found = run(model, drafter, slots, logprobs=True)
    assert_same(found, run(model, NoDrafts(), slots, logprobs=True))
    assert {count for given in drafter.rows for count in given} == {1}


@pytest.mark.parametrize("weights", ["int8", "q4", "exact12"])
def test_in_few_bits(body: NativeBody, weights: Weights) -> None:
    model = packed(body, weights)
    assert_same(run(model, ahead(model)), run(model, NoDrafts()))


def test_passes_are_counted_one_by_one(model: Decoder) -> None:
    session = Session(model, num_slots=1, capacity=64)
    [result] = finish(session, [Request(PROMPTS[0], 20, ahead(model))])
    assert session.num_target_passes == len(result.tokens) == 20


def test_every_end_cuts_like_one_call_a_token(model: Decoder) -> None:
    """Nothing is decided behind an end token; behind a stop string something is, and forgotten."""
    drafter = ahead(model)
    session = Session(model, num_slots=1, capacity=64)
    [plain] = finish(session, [Request(PROMPTS[1], 21, NoDrafts())])
    for end in set(plain.tokens):
        upto = plain.tokens[: plain.tokens.index(end) + 1]
        drafter.proposed.clear()
        stop = StopRule(end_tokens=frozenset([end, VOCAB + 5]))
        [result] = finish(session, [Request(PROMPTS[1], 21, drafter, stop=stop)])
        assert (result.tokens, result.reason) == (upto, "stop")
        assert sum(sum(given) for given in drafter.rows) == len(upto), "an end is never a row: nobody asks what follows"
        spelled = StopRule(stop_strings=(chr(end + 40),), detokenize=lambda ids: "".join(chr(i + 40) for i in ids))
        [result] = finish(session, [Request(PROMPTS[1], 21, drafter, stop=spelled)])
        assert (result.tokens, result.reason) == (upto, "stop")
        assert result.stats.num_spec_steps == len(upto)
        assert not session.cache.lengths[0]


def test_what_is_emitted_is_a_token_a_pass(model: Decoder) -> None:
    """So who traces a text sees passes, and no guesses."""
    session = Session(model, num_slots=1, capacity=64)
    session.admit(Request(PROMPTS[0], 17, ahead(model), shows_guesses=True))
    emitted = list(session.drain())
    assert [len(e.tokens) for e in emitted] == [1] * 17
    assert all(e.guesses == ((),) for e in emitted)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize(("slots", "every"), [(1, 0), (6, 2)])
def test_drawn_text_of_one_call_a_token(model: Decoder, slots: int, every: int, top_p: float) -> None:
    """As many steps in a call as of a greedy text, unless logits are capped; log p is that of the model."""
    drafter = ahead(model)
    drawn = {"sampling": Sampling(do_sample=True, temperature=0.9, top_p=top_p), "seed": 3, "logprobs": True}
    found = run(model, drafter, slots, every, **drawn)
    assert_same(found, run(model, NoDrafts(), slots, every, **drawn))
    assert found != run(model, NoDrafts(), slots, every, **{**drawn, "seed": 4})
    assert max(map(max, drafter.rows)) == (1 if model.config.logit_softcap else MAX_TOKENS)


@pytest.mark.slow_where(lambda model, changed, **_: model != "tied" and "repetition_penalty" not in changed)
@pytest.mark.parametrize("changed", [{"repetition_penalty": 1.3}, {"top_k": 9}, {"min_p": 0.1}, {"temperature": 1e-3}])
def test_processors_and_padded_calls_go_token_by_token(model: Decoder, changed: dict[str, Any]) -> None:
    drafter = ahead(model)
    sampling = Sampling(do_sample=True, **changed)
    assert_same(run(model, drafter, sampling=sampling, seed=3), run(model, NoDrafts(), sampling=sampling, seed=3))
    assert_same(run(model, drafter, row_count=8), run(model, NoDrafts()))
    assert set(drafter.rows) == {(1,)}
    assert not drafter.steps


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_session_says_how_many_steps_a_call_takes(model: Decoder, count: int) -> None:
    """None at all: then the session verifies each of them; the text and its log p are the same."""
    drafter = Noting(MultiStepPlain(model))
    requests = [Request(prompt, 12, drafter, logprobs=True) for prompt in PROMPTS]
    found = finish(Session(model, num_slots=2, capacity=64, chunk=8, steps_per_call=count), requests)
    assert max(drafter.steps, default=0) == count
    wanted = [replace(request, drafter=NoDrafts()) for request in requests]
    assert_same(found, finish(Session(model, num_slots=2, capacity=64, chunk=8), wanted))


@pytest.mark.parametrize(("pass_s", "most"), [(0.001, MAX_TOKENS), (0.02, 2), (0.2, 1)])
def test_blocks_are_short(body: NativeBody, pass_s: float, most: int) -> None:
    """A model whose pass takes a fifth of a second gives its tokens one by one."""
    model = packed(body)
    clock = Steady()
    decide = model.backend.chain.decide

    def slow(roots: object, *rest: object) -> Decided:
        decided = decide(roots, *rest)
        clock.now += pass_s * max(decided.draft.committed)
        return decided

    model.backend.chain.decide = slow
    drafter = Noting(MultiStepPlain(model, clock=clock))
    finish(Session(model, num_slots=1, capacity=64), [Request(PROMPTS[0], 30, drafter)])
    assert max(given[0] for given in drafter.rows) == most


@pytest.mark.parametrize(("slots", "most"), [(1, 1), (256, 2)])
def test_many_sequences_get_calls_as_long_as_it_takes_to_handle_them(slots: int, most: int) -> None:
    """Passes of .03 s: a call of one text ends after .05 s, one of 224 texts after .067 s; they count as 256."""
    clock, budget = Steady(), StepBudget(lambda: clock.now)

    def context(count: int) -> Any:
        tokens = {slot: [1, 2] for slot in range(count)}
        return SimpleNamespace(steps_per_call=None, slots=tuple(tokens), tokens=tokens, cache=NEW_TEXTS)

    def decide() -> Any:
        clock.now += 0.03
        return SimpleNamespace(steps=[[None]])

    assert budget.count(context(slots)) == 1
    budget.timed(context(slots), decide)
    assert budget.count(context(max(1, slots * 7 // 8))) == most


NEW_TEXTS = SimpleNamespace(prompts=dict.fromkeys(range(256), 1))


def test_auto_weighs_drafts_against_plain_decoding_at_its_best(model: Decoder) -> None:
    """With nothing worth drafting, ``auto`` runs ahead too, and what it measures is a pass."""
    clock = Steady()
    plain = Noting(MultiStepPlain(model, clock=clock))
    auto = Adaptive([NoDrafts("lookup")], plain=plain, clock=clock)
    found = run(model, auto)
    assert [r.tokens for r in found] == [r.tokens for r in run(model, NoDrafts())]
    assert max(given[0] for given in plain.rows) >= MAX_TOKENS // 2
    assert auto._measured[Regime(1), 0].seconds(0) < 5 * clock.tick
