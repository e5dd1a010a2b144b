"""``auto`` drafts where drafting pays, stops where it does not, and says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch

from tests.decode.oracles import plain_text
from tests.decode.runs import finish
from vivace.core.model import Decoder
from vivace.core.seams import Context, Draft, TargetPass, Verdict
from vivace.decode.distributions import Distributions
from vivace.decode.forward import ForwardPass
from vivace.decode.lookup import PromptLookup
from vivace.decode.plain import Stateless
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.methods.auto.drafter import BORROWED, FIRST, Adaptive
from vivace.methods.auto.measured import LONGEST, LOOK_EVERY, Measured
from vivace.methods.auto.regime import Regime, nearest

BF16 = torch.bfloat16


@dataclass
class Clock:
    """Time that passes only when told to."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Priced(Stateless):
    """Knows the text; right at the first ``right`` depths, and asks ``cost`` seconds per guess."""

    text: Sequence[int]
    clock: Clock
    cost: float
    right: int = LONGEST
    name: str = "priced"
    traversal: ForwardPass = field(default_factory=ForwardPass)
    asked: list[int] = field(default_factory=list)

    crowd: float = 0.0
    """Seconds that each further row of a pass costs beyond the first."""

    def propose(self, context: Context) -> Draft:
        draft = context.committed()
        guesses = {slot: self.text[len(context.tokens[slot]) :][: context.max_nodes[slot]] for slot in context.slots}
        leaves = dict(zip(draft.slots, draft.last_committed().tolist(), strict=True))
        for depth in range(max(map(len, guesses.values()))):
            growing = [slot for slot in context.slots if len(guesses[slot]) > depth]
            tokens = [guesses[slot][depth] + (depth >= self.right) for slot in growing]
            rows = torch.tensor([leaves[slot] for slot in growing])
            draft, rows = draft.grow(rows, torch.tensor(tokens)[:, None] % 97)
            leaves.update(zip(growing, rows.tolist(), strict=True))
        self.asked.append(max(map(len, guesses.values())))
        self.clock.now += self.cost * self.asked[-1]
        return draft

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        if verdict is not None:
            self.clock.now += 1.0 + self.crowd * (len(draft.tokens) - 1)


@dataclass
class Passing(Stateless):
    """Stands in for drafting nothing: a step costs one second."""

    clock: Clock
    name: str = "plain"
    traversal: ForwardPass = field(default_factory=ForwardPass)

    def propose(self, context: Context) -> Draft:
        return context.committed()

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """The priced drafter, which sees every pass too, has counted the second."""


@pytest.fixture
def setting(models: Callable[..., Decoder]) -> Callable[..., tuple[Adaptive, Priced, Request]]:
    """An adaptive drafter over one priced drafter, and a request for ``count`` tokens."""

    def get(count: int, **price: float) -> tuple[Adaptive, Priced, Request]:
        text = plain_text(models(BF16), (3, 1, 4), 100)
        clock = Clock()
        priced = Priced([*text.prompt, *text.new], clock, **price)
        adaptive = Adaptive([priced], clock=clock)
        adaptive.drafters = (Passing(clock), priced)
        return adaptive, priced, Request(text.prompt, count, adaptive)

    return get


def run(model: Decoder, request: Request) -> list[str | None]:
    """Reasons, step by step."""
    session = Session(model, num_slots=1, capacity=128)
    session.admit(request)
    reasons = []
    while not session.is_idle:
        [*_, emitted] = session.step()
        reasons.append(emitted.stats.choice)
    return reasons


def test_cheap_and_right_drafts_are_taken_in_full(models, setting) -> None:
    _, priced, request = setting(90, cost=0.01)
    assert "gives" in run(models(BF16), request)[-1]
    assert priced.asked[-3] == LONGEST
    assert sum(n == LONGEST for n in priced.asked) > len(priced.asked) / 2


def test_the_last_token_does_not_hide_why_others_were_drafted_as_they_were(models, setting) -> None:
    """It needs no guesses, so that nothing is chosen for it."""
    *_, before, last = run(models(BF16), setting(30, cost=0.1, right=0)[2])
    assert "priced" in before
    assert last == before
    assert run(models(BF16), setting(1, cost=0.1)[2]) == [None]


def test_no_longer_than_guesses_are_right(models, setting) -> None:
    _, priced, request = setting(90, cost=0.1, right=2)
    run(models(BF16), request)
    assert priced.asked[-4] == 2


def test_depths_that_were_given_up_are_tried_again(models, setting) -> None:
    """Guesses that were wrong beyond the second depth become right; the drafter that is taken is asked for more."""
    _, priced, request = setting(100, cost=0.1, right=2)
    model = models(BF16)
    run(model, request)
    assert priced.asked[-4] == 2
    priced.right, before = LONGEST, len(priced.asked)
    for _ in range(3):
        run(model, request)
    later = priced.asked[before:]
    assert LONGEST in later[: 2 * LOOK_EVERY]
    assert sum(n == LONGEST for n in later[-20:]) > 10


def test_looking_further_costs_few_steps_and_fewer_each_time(models, setting) -> None:
    _, priced, request = setting(100, cost=0.1, right=2)
    model = models(BF16)
    for _ in range(8):
        run(model, request)
    far = [step for step, n in enumerate(priced.asked) if n == LONGEST]
    gaps = [late - early for early, late in pairwise(far)]
    waits = [gap for gap in gaps if gap >= LOOK_EVERY]
    assert len(waits) >= 3
    assert all(late > 1.5 * early for early, late in pairwise(waits))


def test_dear_drafts_are_left_alone_and_the_reason_is_given(models, setting) -> None:
    _, priced, request = setting(90, cost=2.0)
    reasons = run(models(BF16), request)
    drafting = [n for n in priced.asked if n]
    assert len(drafting) <= len(FIRST) + 1 + len(reasons) // LOOK_EVERY
    assert any("not drafting" in reason for reason in reasons)
    assert "not drafting" in reasons[-2]


def test_the_first_step_of_a_drafter_is_not_held_against_it(models, setting) -> None:
    """It may lay out weights for seconds; the steps after it tell what a guess costs."""
    _, priced, request = setting(90, cost=0.01)
    model = models(BF16)
    session = Session(model, num_slots=1, capacity=128)
    session.admit(request)
    priced.cost = 1000.0
    while not priced.asked or priced.asked[-1] == 0:
        session.step()
    priced.cost = 0.01
    while not session.is_idle:
        session.step()
    assert sum(n == LONGEST for n in priced.asked) > len(priced.asked) / 2


def test_what_keeps_losing_is_asked_rarely(models, setting) -> None:
    """After 32 steps, 64 and 128: a look costs several plain steps."""
    _, priced, request = setting(100, cost=2.0)
    model, reasons = models(BF16), []
    for _ in range(4):
        reasons += run(model, request)
    asked = [step for step, reason in enumerate(reasons) if reason == f"measuring {priced.name}"]
    first, later = asked[: len(FIRST) + 1], asked[len(FIRST) + 1 :]
    assert first[-1] < 10, "one does not count, since it may lay out weights"
    gaps = [late - early for early, late in pairwise([first[-1], *later])]
    assert all(late > 1.5 * early for early, late in pairwise(gaps))
    assert gaps[0] >= LOOK_EVERY
    assert len(later) <= 4


def test_at_batch_eight_it_stops_where_rows_cost_and_says_so(models, setting) -> None:
    """A pass over eight texts is no longer bound by reading weights: further rows cost what they compute."""
    adaptive, priced, request = setting(60, cost=0.01, crowd=0.4)
    assert "gives" in run(models(BF16), request)[-1], "alone it pays"
    session = Session(models(BF16), num_slots=8, capacity=128)
    for _ in range(8):
        session.admit(request)
    priced.cost, priced.right, reasons = 0.5, 1, []
    drafting = session.drafting(adaptive)
    while not session.is_idle:
        session.step()
        reasons.append(drafting.reason or "")
    assert sum("plain at batch 8: not drafting" in reason for reason in reasons) > len(reasons) / 2


def test_at_batch_eight_it_drafts_where_that_pays(models, setting) -> None:
    adaptive, _, request = setting(60, cost=0.01, crowd=0.01)
    session = Session(models(BF16), num_slots=8, capacity=128)
    for _ in range(8):
        session.admit(request)
    drafting, reasons = session.drafting(adaptive), []
    while not session.is_idle:
        session.step()
        reasons.append(drafting.reason or "")
    assert any(f"{LONGEST} guesses gives" in reason and "at batch 8" in reason for reason in reasons)


def test_a_drafter_that_becomes_dear_in_mid_run_is_switched_off(models, setting) -> None:
    _, priced, request = setting(100, cost=0.01)
    model = models(BF16)
    session = Session(model, num_slots=1, capacity=128)
    session.admit(replace(request, max_new_tokens=100))
    for _ in range(12):
        session.step()
    assert priced.asked[-1] > 0
    priced.cost = 30.0
    drafting, later = session.drafting(request.drafter), []
    while not session.is_idle:
        session.step()
        later.append(drafting.choice.guesses)
    assert 0 in later[:12], "switched off within a dozen steps"
    assert set(later[12 : 12 + LOOK_EVERY // 2]) <= {0}


def test_a_busy_moment_at_the_start_is_forgotten(models, setting) -> None:
    """What was measured then ages while nothing is drafted; the next look decides."""
    _, priced, request = setting(100, cost=30.0)
    session = Session(models(BF16), num_slots=1, capacity=128)
    session.admit(request)
    while sum(n > 0 for n in priced.asked) < len(FIRST) + 1:
        session.step()
    priced.cost, drafting, later = 0.01, session.drafting(request.drafter), []
    while not session.is_idle:
        session.step()
        later.append(drafting.choice.guesses)
    assert set(later[2 : LOOK_EVERY // 2]) == {0}
    assert later[-4] > 0
    run(models(BF16), request)
    assert LONGEST in priced.asked[-100:], "and then deeper drafts"


def test_the_text_is_plain_decoding_whatever_is_chosen(models, setting) -> None:
    _, priced, request = setting(60, cost=0.01, right=1)
    session = Session(models(BF16), num_slots=1, capacity=128)
    [result] = finish(session, [request])
    assert list(result.tokens) == list(priced.text[3:63])


def test_nothing_is_drafted_beyond_the_limit(models, setting) -> None:
    _, priced, request = setting(3, cost=0.01)
    run(models(BF16), request)
    assert all(n <= 2 for n in priced.asked)


def test_the_cost_of_a_guess_is_the_slope_of_the_line() -> None:
    arm = Measured()
    for guesses in (8, 1, 4, 2, 8) * 12:
        arm.record([guesses], 2.0 + 0.5 * guesses, guesses, [1])
    assert arm.seconds(0) == pytest.approx(2.0)
    assert arm.seconds(6) == pytest.approx(5.0)
    assert arm.tokens(1) == pytest.approx(2.0)
    assert arm.tokens(8) == pytest.approx(2.0, rel=0.02), "a deeper guess inherits next to nothing any more"


def test_a_chain_that_stops_costs_the_guesses_that_it_makes() -> None:
    """Eight are allowed, and the drafter is sure of two or four of them: the best is to allow it all it wants."""
    arm = Measured()
    for guesses in (2, 4) * 40:
        arm.record([guesses], 2.0 + 0.5 * guesses, 8, [guesses])
    assert arm.guesses(8) == pytest.approx(3.0, rel=0.05)
    assert arm.guesses(2) == pytest.approx(2.0)
    assert arm.best()[1] == pytest.approx(4.0 / 3.5, rel=0.05)


def test_a_batch_that_shrinks_begins_with_what_was_seen_before(models, setting) -> None:
    """Eight sequences are measured; seven, four and nine begin where they left off, three and twenty anew."""
    adaptive, _, request = setting(90, cost=0.01)
    run(models(BF16), request)
    arms = [adaptive._measured[Regime(1), index] for index in range(2)]
    adaptive._measured = {(Regime(8), index): arm for index, arm in enumerate(arms)}
    for batch in (7, 4, 9, 3, 20):
        regime = Regime(batch)
        chosen = adaptive.choose(regime, LONGEST)
        assert chosen.reason.startswith("measuring") == (batch in (3, 20)), (batch, chosen)
        for index in range(2):
            seen = adaptive._measured[regime, index]
            assert seen.own == 0
            if batch not in (3, 20):
                assert 0 < seen.mixed.weight <= BORROWED
                assert seen.seconds(2) == pytest.approx(arms[index].seconds(2))
    adaptive._measured[Regime(7), 0].record([0], 5.0, 0, [0])
    assert arms[0].seconds(0) != adaptive._measured[Regime(7), 0].seconds(0), "what it sees itself is its own"
    measured = [other for other in adaptive._regimes() if adaptive._is_measured(other)]
    assert nearest(Regime(20), measured) is None, "what was borrowed is not lent on"


def test_drawn_tokens_and_long_texts_are_measured_by_themselves(models, setting) -> None:
    adaptive, _, request = setting(90, cost=0.01)
    run(models(BF16), request)
    assert adaptive.choose(Regime(1, is_drawn=True), LONGEST).reason.startswith("measuring")
    longer = adaptive.choose(Regime(1, length=3), LONGEST)
    assert "gives" in longer.reason, "it begins with what shorter texts cost"
    assert "texts of 4096 tokens and more" in longer.reason


def test_what_the_last_token_left_is_no_measurement(models, setting) -> None:
    """A step without room is counted for drafting nothing before anything else was measured."""
    adaptive, _, request = setting(2, cost=0.01)
    run(models(BF16), request)
    adaptive._measured = {(Regime(1), 0): Measured()}
    assert adaptive.choose(Regime(1), LONGEST).reason.startswith("measuring")


def test_every_drafter_goes_back_to_what_it_knew(models: Callable[..., Decoder]) -> None:
    cache = models(BF16).new_cache(2, 64)
    state = Adaptive([PromptLookup(), PromptLookup()]).open(cache)
    lookups = state._states[1:]
    context = Context((0,), {0: [1, 2, 3]}, cache, Distributions({}, {}, cache.lengths))
    lookups[0].propose(context)
    saved = state.saved()
    lookups[1].propose(context)
    state.restore(saved)
    assert [list(lookup._index) for lookup in lookups] == [[0], []]
