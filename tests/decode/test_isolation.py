"""What fails in a request ends that request alone, and those beside it never learn of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.decode.failing import CALLS, Failing, Outcome, Panic, Plan, bars_from, explode, outcomes
from tests.decode.tiny_decoders import prompts
from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.core.seams import Drafter
from vivace.decode.isolation import parts_of
from vivace.decode.lookup import PromptLookup
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request, StopRule
from vivace.decode.session import Session
from vivace.errors import CapacityError, DecodingError, NoTokenError, UsageError
from vivace.methods.draft.drafter import DraftModel, DraftModelConfig

Models = Callable[..., Decoder]
LENGTH = 14
DRAWN = Sampling(do_sample=True, temperature=1.3)
ERRORS = [RuntimeError("planted"), MemoryError(), Panic("planted")]
AT = {MemoryError: (0, False), Panic: (4, True)}
"""Where the others than the first are raised: what is made again does not depend on them."""


def session(models: Models, slots: int = 4) -> Session:
    return Session(models(torch.float32), num_slots=slots, capacity=64, chunk=8, prefill_budget=16)


def drafted(models: Models) -> DraftModel:
    """Guesses are drawn: what a session remembers of them and of random numbers decides the text."""
    return DraftModel(models(torch.float32, seed=3), 97, DraftModelConfig(3))


def requests(drafter: Drafter, count: int = 4) -> list[Request]:
    """Greedy ones and drawn ones, some with prompts of several chunks."""
    return [
        Request(
            prompt, LENGTH, drafter, sampling=DRAWN if place % 2 else Sampling(), seed=place, shows_guesses=True
        )
        for place, prompt in enumerate(prompts(count + 1)[1:])
    ]  # fmt: skip


def alone(models: Models, asked: Sequence[Request]) -> list[Outcome]:
    """What each gets in a session of its own."""
    return [outcomes(session(models, 1), [request])[0] for request in asked]


@cache
def undisturbed(models: Models) -> tuple[Outcome, ...]:
    """What the four requests of most tests get so."""
    return tuple(alone(models, requests(drafted(models))))


def only_one_failed(
    found: list[Outcome], expected: Sequence[Outcome], place: int, says: str, kind: type[Exception]
) -> None:
    for index, (got, want) in enumerate(zip(found, expected, strict=True)):
        if index != place:
            assert got == want
    failed = found[place]
    assert failed.reason == "error"
    assert isinstance(failed.error, kind)
    assert says in str(failed.error)
    assert failed.tokens == expected[place].tokens[: len(failed.tokens)]


# A pass that fails once


@pytest.mark.slow_where(
    lambda error, at, is_late, call: not isinstance(error, RuntimeError) and (at, is_late) != AT[type(error)]
)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("is_late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("call", CALLS)
def test_a_pass_that_fails_once_changes_nothing(
    models: Models, call: str, at: int, is_late: bool, error: BaseException
) -> None:
    """It is made again in parts, with the memory and the random numbers it began with."""
    plan = Plan(call, at, is_late=is_late, error=error, concerns=lambda slots: len(slots) > 1)
    drafter = drafted(models)
    found = outcomes(session(models), requests(Failing(drafter, plan)), every=2)
    assert plan.num_failed == 1
    assert found == [*undisturbed(models)]


# A pass that fails whenever one request is in it


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("place", [0, 3])
def test_whom_a_pass_always_fails_for_ends_alone(models: Models, call: str, place: int) -> None:
    drafter = drafted(models)
    running = session(models)
    slot_of_it = place  # slots are given in order while none is free again
    plan = Plan(call, 3, stays=True, concerns=lambda slots: slot_of_it in slots)
    found = outcomes(running, requests(Failing(drafter, plan)))
    only_one_failed(found, undisturbed(models), place, "planted", DecodingError)
    assert isinstance(found[place].error.__cause__, RuntimeError)  # type: ignore[union-attr]
    later = outcomes(running, requests(drafter))
    assert later == [*undisturbed(models)], "its slot is as good as new"


@pytest.mark.parametrize("call", ["truncate", "release", "open"])
def test_other_calls_of_a_drafter_may_fail_too(models: Models, call: str) -> None:
    """One request has a drafter of its own, and ends inside a block."""
    drafter = drafted(models)
    asked, expected = requests(drafter), undisturbed(models)
    plan = Plan(call, stays=True)
    stop = StopRule(end_tokens=frozenset(expected[1].tokens[3:4]))
    failing = Failing(drafter, plan)
    asked[1] = replace(asked[1], drafter=failing, stop=stop)
    running = session(models)
    before = None if call == "open" else running.drafting(failing)
    found = outcomes(running, asked)
    for place in (0, 2, 3):
        assert found[place] == expected[place]
    if call == "open":
        assert isinstance(found[1].error, DecodingError)
        assert plan.num_failed == 1
    if call == "release":
        assert found[1].reason == "stop", "a text that was complete is"
        assert running.drafting(failing) is not before, "what could not be forgotten serves nobody else"
    assert len(running._free) == 4
    assert outcomes(running, requests(drafter)) == [*undisturbed(models)]


def test_a_drafter_that_always_fails_ends_its_own_requests(models: Models) -> None:
    good, bad = drafted(models), Failing(PromptLookup(), Plan("propose", stays=True))
    asked = [replace(r, drafter=bad) if place in (1, 2) else r for place, r in enumerate(requests(good))]
    found, expected = outcomes(session(models), asked), undisturbed(models)
    for place in (1, 2):
        assert isinstance(found[place].error, DecodingError)
    assert [found[0], found[3]] == [expected[0], expected[3]]


def test_those_who_came_through_before_go_on_together(models: Models) -> None:
    """A newcomer is the likely cause: one pass without it, and not one for each."""
    sizes: list[int] = []
    plan = Plan("propose", stays=True, concerns=lambda slots: sizes.append(len(slots)) or 3 in slots)  # type: ignore[func-returns-value]
    asked = [replace(request, tokens=request.tokens[:1]) for request in requests(Failing(NoDrafts(), plan))]
    running = session(models)
    for request in asked[:3]:
        running.admit(request)
    running.step()
    running.admit(asked[3])
    sizes.clear()
    running.step()
    assert sizes == [4, 3, 1]


def test_parts_of_a_failed_pass() -> None:
    class One:
        def __init__(self, num_passes: int) -> None:
            self.num_passes = num_passes

    old, older, new, newer = One(2), One(9), One(0), One(0)
    assert parts_of([old, new, older, newer]) == [[old, older], [new], [newer]]
    assert parts_of([old, older]) == [[old], [older]]
    assert parts_of([new, newer]) == [[new], [newer]]


# What runs for one request only


def fails_from(length: int, error: BaseException) -> Callable[[Tensor, Tensor], Tensor]:
    def fail(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] >= length:
            raise error
        return scores

    return fail


@pytest.mark.slow_where(lambda sampling, error: sampling == DRAWN and isinstance(error, MemoryError | Panic))
@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("error", [*ERRORS, CapacityError("too much")], ids=lambda error: type(error).__name__)
def test_a_processor_fails_for_its_request(models: Models, sampling: Sampling, error: BaseException) -> None:
    drafter = drafted(models)
    asked, expected = requests(drafter), [*undisturbed(models)]
    bad = fails_from(len(asked[2].tokens) + 5, error)
    asked[2] = replace(asked[2], processors=(bad,), sampling=sampling)
    expected[2] = alone(models, [replace(asked[2], processors=())])[0]
    found = outcomes(session(models), asked)
    kind = CapacityError if isinstance(error, CapacityError) else DecodingError
    only_one_failed(found, expected, 2, "too much" if kind is CapacityError else "logits processors", kind)
    assert found[2].tokens == expected[2].tokens[:5], "drafts that look further do not end it sooner"


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("method", ["draft", "plain"])
def test_a_request_that_excludes_every_token_is_told_so(models: Models, method: str, sampling: Sampling) -> None:
    """Not before the text is there: what is drafted beyond is nobody's concern."""
    drafter = drafted(models) if method == "draft" else NoDrafts()
    asked = requests(drafter)
    expected = alone(models, asked)
    free = replace(asked[2], sampling=sampling, processors=(lambda ids, scores: scores,))
    expected[2] = alone(models, [free])[0]
    asked[2] = replace(free, processors=(bars_from(len(free.tokens) + 6),), stop=StopRule(min_new_tokens=9))
    found = outcomes(session(models), asked)
    only_one_failed(found, expected, 2, "after 6 new ones", NoTokenError)
    assert found[2].tokens == expected[2].tokens[:6]
    assert "logits processors" in str(found[2].error)
    assert "least length" in str(found[2].error)
    assert isinstance(found[2].error, UsageError)


def test_what_a_request_never_gets_to_does_not_end_it(models: Models) -> None:
    """Its limit comes first, though drafts look further."""
    drafter = drafted(models)
    request = requests(drafter)[1]
    bounded = replace(request, processors=(bars_from(len(request.tokens) + LENGTH),))
    assert outcomes(session(models), [bounded])[0].reason == "length"


def test_a_ban_that_leaves_no_token_is_named(models: Models) -> None:
    sampling = Sampling(no_repeat_ngram_size=1)
    small = models(torch.float32, vocab=7)
    running = Session(small, num_slots=1, capacity=64)
    (found,) = outcomes(running, [Request((1,), 20, NoDrafts(), sampling=sampling)])
    assert sorted({1, *found.tokens}) == list(range(7)), "every token once"
    assert "repeated n-grams" in str(found.error)


def test_a_stop_rule_fails_for_its_request(models: Models) -> None:
    def criterion(new: Sequence[int]) -> bool:
        return 1 / (len(new) - 5) > 2

    def detokenize(new: Sequence[int]) -> str:
        raise UnicodeDecodeError("utf-8", b"", 0, 1, "planted")

    drafter = drafted(models)
    expected = undisturbed(models)
    for stop in (StopRule(criterion=criterion), StopRule(stop_strings=("x",), detokenize=detokenize)):
        asked = requests(drafter)
        asked[1] = replace(asked[1], stop=stop)
        only_one_failed(outcomes(session(models), asked), expected, 1, "stop rule", DecodingError)


class FailingPrefix:
    """Fills ``Prefix``."""

    keeps_answers = False

    def __init__(self, call: str) -> None:
        self.call = call

    def attach(self, tokens: Sequence[int], slot: int, cache: KVCache) -> int:
        if self.call == "lies":
            return 3
        if self.call == "attach":
            cache.reserve([slot], [5])
            cache.commit([slot], [range(6)])
            raise MemoryError
        return 0

    def keep(self, tokens: Sequence[int], slot: int, cache: KVCache) -> None:
        if self.call == "keep":
            raise RuntimeError("planted")


@pytest.mark.parametrize("call", ["attach", "keep", "lies"])
def test_a_cached_prompt_fails_for_its_request(models: Models, call: str) -> None:
    drafter = drafted(models)
    asked, expected = requests(drafter), [*undisturbed(models)]
    asked[1] = replace(asked[1], tokens=tuple(range(20)), prefix=FailingPrefix(call))
    expected[1] = alone(models, [replace(asked[1], prefix=None)])[0]
    running = session(models, slots=2)
    found = outcomes(running, asked)
    only_one_failed(found, expected, 1, "prompt", DecodingError)
    assert running.cache.lengths == [0, 0]
    assert running._prompts.num_read == running._prompts.num_asked
    assert outcomes(running, requests(drafter)) == [*undisturbed(models)]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_prompt_whose_pass_fails_is_read_again(models: Models, is_late: bool) -> None:
    """Prompt passes are shared by all methods."""
    plan = Plan("observe", is_late=is_late)
    drafter, other = drafted(models), NoDrafts()
    asked = requests(Failing(drafter, plan))
    asked[0], asked[2] = replace(asked[0], drafter=other), replace(asked[2], drafter=other)
    expected = alone(models, [replace(r, drafter=drafter if r.drafter is not other else other) for r in asked])
    assert outcomes(session(models), asked) == expected
    assert plan.num_failed == 1


# What ends more than a request


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()])
def test_what_ends_the_program_is_not_held_up(models: Models, error: BaseException) -> None:
    asked = replace(requests(NoDrafts())[0], processors=(fails_from(0, error),))
    running = session(models)
    running.admit(asked)
    with pytest.raises(type(error)):
        for _ in running.drain():
            pass
    assert running.is_idle


def test_draining_raises_what_failed_and_leaves_the_session_usable(models: Models) -> None:
    drafter = drafted(models)
    asked = requests(drafter)
    running = session(models)
    for request in (replace(asked[0], processors=(explode,)), *asked[1:]):
        running.admit(request)
    with pytest.raises(DecodingError, match="logits processors: ZeroDivisionError: a bug of its own"):
        for _ in running.drain():
            pass
    assert running.is_idle
    assert outcomes(running, asked) == [*undisturbed(models)]


def test_random_numbers_of_a_slot_are_its_own(models: Models) -> None:
    """A seed that no generator takes is the fault of the request that brings it."""
    drafter = NoDrafts()
    asked = [replace(requests(drafter)[0], seed=2**70), *requests(drafter)[1:]]
    found = outcomes(session(models), asked)
    assert isinstance(found[0].error, DecodingError)
    assert found[1:] == alone(models, requests(drafter)[1:])
