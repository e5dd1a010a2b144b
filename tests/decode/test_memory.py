"""Texts under a limit of memory: each gets a slot once its greatest size fits, and gives it back whatever happens."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from tests.decode.failing import CALLS, Failing, Outcome, Plan, explode, outcomes
from tests.decode.tiny_decoders import prompts
from vivace.core.model import Decoder
from vivace.core.seams import Drafter
from vivace.decode.memory import MemoryBudget, text_bytes
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.errors import BusyError, DecodingError, MemoryLimitError
from vivace.methods.draft.drafter import DraftModel, DraftModelConfig

Models = Callable[..., Decoder]
TOTAL = 36
"""Tokens of every text, its prompt among them."""


def requests(drafter: Drafter, count: int = 5) -> list[Request]:
    return [Request(prompt, TOTAL - len(prompt), drafter) for prompt in prompts(count)]


def session(models: Models, memory: MemoryBudget | None = None, slots: int = 4) -> Session:
    return Session(models(torch.float32), num_slots=slots, capacity=64, chunk=8, memory=memory)


def room_for(models: Models, count: int, drafter: Drafter) -> MemoryBudget:
    """A budget for so many of the texts, and nearly one more."""
    return MemoryBudget((count + 1) * text_bytes(models(torch.float32), drafter, TOTAL) - 1)


def drafted(models: Models) -> DraftModel:
    return DraftModel(models(torch.float32, seed=3, num_layers=1), 97, DraftModelConfig(3))


def watched(running: Session, asked: Sequence[Request]) -> tuple[list[Outcome], int]:
    """What becomes of requests, and how many were in a slot at once."""
    budget, step, most = running.memory, running.step, 0

    def watch() -> list[object]:
        nonlocal most
        emitted = step()
        most = max(most, len(running.reading))
        assert budget.limit_bytes is None or budget.taken_bytes + budget.held_bytes <= budget.limit_bytes
        return emitted

    running.step = watch  # type: ignore[method-assign]
    return outcomes(running, asked), most


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "draft"])
def test_texts_that_do_not_fit_together_run_in_turn(models: Models, count: int, drafts: bool) -> None:
    drafter = drafted(models) if drafts else NoDrafts()
    wanted = outcomes(session(models), requests(drafter))
    found, most = watched(session(models, room_for(models, count, drafter)), requests(drafter))
    assert found == wanted
    assert most == count


def test_a_drafters_own_cache_counts(models: Models) -> None:
    drafter = drafted(models)
    own = drafter.model.slot_bytes(100)
    assert text_bytes(models(torch.float32), drafter, TOTAL) == models(torch.float32).slot_bytes(100) + own
    budget = MemoryBudget(2 * text_bytes(models(torch.float32), NoDrafts(), TOTAL) + own)
    assert watched(session(models, budget), requests(NoDrafts()))[1] == 2
    assert watched(session(models, budget), requests(drafter))[1] == 1


def test_what_can_never_fit_is_refused_with_the_numbers(models: Models) -> None:
    running = session(models, MemoryBudget(40 << 10))
    with pytest.raises(MemoryLimitError, match=r"36 tokens takes up to 144.0 KiB .* of 40.0 KiB of memory 40.0 KiB"):
        running.admit(requests(NoDrafts())[0])
    assert running.is_idle


def test_a_large_text_is_not_kept_out_by_small_ones(models: Models) -> None:
    small, large = requests(NoDrafts(), 2)[1], Request(tuple(range(60)), 4, NoDrafts())
    budget = MemoryBudget(text_bytes(models(torch.float32), NoDrafts(), 64))
    running = session(models, budget)
    names = {running.admit(one): place for place, one in enumerate((small, large, small))}
    assert [names[e.request_id] for e in running.drain() if e.finish_reason] == [0, 1, 2]


# Given back


@pytest.mark.parametrize("call", [*CALLS, "open", "truncate", "release"])
def test_whoever_fails_gives_back_what_it_had(models: Models, call: str) -> None:
    plan = Plan(call, stays=True)
    budget = room_for(models, 2, NoDrafts())
    bad = requests(Failing(NoDrafts(), plan))[1]
    found = outcomes(session(models, budget), [bad, *requests(NoDrafts())])
    assert (found[0].error is None) == (call in ("truncate", "release"))
    assert [one.error for one in found[1:]] == [None] * 5
    assert budget.taken_bytes == 0


def test_a_request_that_is_cancelled_or_explodes_gives_back(models: Models) -> None:
    budget = room_for(models, 2, NoDrafts())
    running, asked = session(models, budget), requests(NoDrafts(), 5)
    exploding = running.admit(replace(asked[1], processors=(explode,)))
    first, second, third = (running.admit(one) for one in asked[2:])
    seen = [emitted for _ in range(8) for emitted in running.step()]
    assert [type(e.error) for e in seen if e.request_id == exploding] == [DecodingError]
    assert set(running.reading) == {first, second}
    running.cancel(first)
    running.step()
    assert set(running.reading) == {second, third}
    running.close()
    assert (running.is_idle, budget.taken_bytes) == (True, 0)


def test_a_session_that_is_dropped_gives_back(models: Models) -> None:
    budget = room_for(models, 2, NoDrafts())
    running = session(models, budget)
    running.admit(requests(NoDrafts())[1])
    running.step()
    assert budget.taken_bytes > 0
    del running
    gc.collect()
    assert budget.taken_bytes == 0


def test_nobody_waits_for_a_session_that_does_not_run(models: Models) -> None:
    budget = room_for(models, 1, NoDrafts())
    other, running = session(models, budget), session(models, budget)
    other.admit(requests(NoDrafts())[1])
    other.step()
    running.admit(requests(NoDrafts())[2])
    with pytest.raises(BusyError, match="try again when they have ended"):
        list(running.drain())
    other.close()
    running.admit(requests(NoDrafts())[2])
    assert list(running.drain())[-1].finish_reason == "length"


def test_whatever_comes_and_goes_the_limit_holds(models: Models) -> None:
    chance, budget = random.Random(5), room_for(models, 3, NoDrafts())
    running, asked, left = session(models, budget), requests(NoDrafts(), 12), set[int]()
    for _ in range(300):
        if chance.random() < 0.2:
            one = chance.choice(asked)
            left.add(running.admit(replace(one, max_new_tokens=chance.randrange(1, 64 - len(one.tokens)))))
        if left and chance.random() < 0.1:
            gone = chance.choice(sorted(left))
            running.cancel(gone)
            left.discard(gone)
        left -= {e.request_id for e in running.step() if e.finish_reason}
        assert budget.taken_bytes <= (budget.limit_bytes or 0)
        assert (budget.taken_bytes > 0) == (len(running.reading) > 0)
    while left:
        left -= {e.request_id for e in running.step() if e.finish_reason}
    assert (running.is_idle, budget.taken_bytes) == (True, 0)


# What stays


class Owner:
    """Somebody who holds bytes."""


def test_what_stays_counts_for_as_long_as_it_lives() -> None:
    budget, owner = MemoryBudget(100), Owner()
    budget.hold(owner, 60, "weights")
    assert (budget.held_bytes, budget.room_bytes, budget.report) == (60, 40, "weights 60 B")
    with pytest.raises(
        MemoryLimitError, match="100 B of memory are too few: the draft model takes 50 B beside weights"
    ):
        budget.hold(Owner(), 50, "the draft model")
    budget.take(30)
    with pytest.raises(BusyError, match="takes 20 B of memory and 10 B are free now"):
        budget.hold(Owner(), 20, "method eagle")
    budget.give_back(30)
    assert (budget.free_bytes, budget.most_taken_bytes) == (40, 30)
    del owner
    assert (budget.held_bytes, budget.report) == (0, "")


def test_without_a_limit_everything_is_counted_and_nothing_refused(models: Models) -> None:
    budget = MemoryBudget()
    budget.hold(self := Owner(), 1 << 60, "weights")
    running = session(models, budget)
    running.admit(requests(NoDrafts())[1])
    running.step()
    assert (budget.room_bytes, budget.free_bytes, budget.held_bytes) == (None, None, 1 << 60)
    assert budget.taken_bytes == text_bytes(models(torch.float32), NoDrafts(), TOTAL)
    del self


def test_the_longest_text_is_the_longest_that_fits(models: Models) -> None:
    model, drafter = models(torch.float32), drafted(models)
    budget = MemoryBudget(text_bytes(model, drafter, 300))
    longest = budget.longest_text(model, drafter, 512)
    assert (
        text_bytes(model, drafter, longest) <= text_bytes(model, drafter, 300) < text_bytes(model, drafter, longest + 1)
    )
    assert budget.longest_text(model, drafter, 200) == 200
    assert MemoryBudget().longest_text(model, drafter, 512) == 512
    assert MemoryBudget(1).longest_text(model, drafter, 512) == 0
