"""Slots for experts: who is evicted for whom, and who never is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from torch import Tensor

from vivace.storage.experts.policy import Key
from vivace.storage.experts.slots import ExpertSlots, Slot
from vivace.storage.io.async_reader import PendingRead

LAYERS = 4


class Nothing:
    """Fills ``ExpertStore`` for experts that nobody reads or runs."""

    expert_bytes = 16

    def expert(self, memory: Tensor) -> object:
        return memory


class Known:
    """Fills ``Policy`` with next uses that are given, and counts how often it is asked."""

    name, keeps = "known", True

    def __init__(self) -> None:
        self.uses: dict[Key, float] = {}
        self.asked = 0

    def next_uses(self, keys: Sequence[Key], clock: int) -> Sequence[float]:
        self.asked += 1
        return [self.uses[key] for key in keys]


@pytest.fixture
def policy() -> Known:
    return Known()


@pytest.fixture
def slots(policy: Known) -> ExpertSlots:
    """Three slots with experts that are used next at clocks 9, 20 and 15."""
    made = ExpertSlots(Nothing(), policy, LAYERS, 3)  # type: ignore[arg-type]
    for expert, use in enumerate((9.0, 20.0, 15.0)):
        fill(made, policy, (0, expert), use)
    return made


def fill(slots: ExpertSlots, policy: Known, key: Key, use: float, clock: int = 1) -> Slot:
    slot = slots.take(clock)
    assert slot is not None
    slots.put(key, slot)
    policy.uses[key] = use
    return slot


def held(slots: ExpertSlots) -> set[Key]:
    return set(slots.keys)


def without(*experts: int) -> set[Key]:
    return {(0, expert) for expert in range(3) if expert not in experts}


def evictions(slots: ExpertSlots, clock: int, dues: Iterable[int | None]) -> list[bool]:
    return [slots.take(clock, due) is not None for due in dues]


def test_the_expert_used_last_is_evicted_first(slots: ExpertSlots) -> None:
    for gone in ((1,), (1, 2), (0, 1, 2)):
        assert slots.take(4) is not None
        assert held(slots) == without(*gone)
    assert slots.take(4) is None, "all are given away"


def test_a_prefetch_evicts_nobody_who_is_used_before_it(slots: ExpertSlots) -> None:
    assert evictions(slots, 4, [20, 17, 17, 15, 14, 9]) == [False, True, False, False, True, False]
    assert held(slots) == without(1, 2)
    assert evictions(slots, 4, [None]) == [True], "a layer that waits evicts anyone"


def test_experts_in_use_or_being_read_stay(slots: ExpertSlots) -> None:
    slots.in_use = {(0, 1)}
    reading = slots.find((0, 2))
    assert reading is not None
    reading.read = PendingRead(None, 0)  # type: ignore[arg-type]
    slots.empty([(0, 2)])
    assert evictions(slots, 4, [None, None]) == [True, False]
    assert held(slots) == without(0)


def test_a_prediction_protects_until_candidates_are_sorted_again(slots: ExpertSlots, policy: Known) -> None:
    assert slots.take(4, 100) is None
    slots.note_predicted([(0, 1)])
    policy.uses[0, 1] = 5.0
    assert slots.take(4) is not None
    assert held(slots) == without(2), "its prospects may have changed: the next one goes"
    asked = policy.asked
    slots.note_forecast()
    assert slots.take(4) is not None
    assert policy.asked == asked + 1
    assert held(slots) == without(2, 0)


def test_the_policy_is_asked_a_few_times_a_pass(slots: ExpertSlots, policy: Known) -> None:
    asked = policy.asked
    for clock in range(10, 10 + 3 * LAYERS):
        assert slots.take(clock, 100) is None
    assert policy.asked - asked <= 3 * 2 + 1


def test_what_is_dropped_leaves_an_empty_slot(slots: ExpertSlots) -> None:
    slots.empty([(0, 0), (3, 3)])
    assert held(slots) == without(0)
    assert slots.take(4, 0) is not None, "it costs nobody a place"
    assert held(slots) == without(0)
