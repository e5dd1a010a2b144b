"""The device that is not here: it takes the time of its bytes, the most urgent first, and a slot holds what came."""

from __future__ import annotations

import pytest
import torch

from benchmarks.expert_policies import LeastRecent
from benchmarks.paced_device import PacedDevice, PacedExperts
from vivace.core.step import Step
from vivace.storage.experts.cache import ExpertCache
from vivace.storage.io.async_reader import PendingRead

CHUNKS = 4
"""Of a load; one takes a second."""


class Clock:
    """Time passes when somebody sleeps."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def device(clock: Clock) -> PacedDevice:
    return PacedDevice(100, 100.0, clock, clock.sleep)


def submit(device: PacedDevice, due: int, rank: int = 0) -> PendingRead:
    return device.submit_whole(memoryview(bytearray(CHUNKS * 100)), 0, due, rank)


def arrivals(device: PacedDevice, clock: Clock, count: int) -> list[tuple[int, float]]:
    found: list[tuple[int, float]] = []
    while len(found) < count:
        found += [(read.number, round(clock.now)) for read in device.completed(waits=True)]
    assert device.completed(waits=True) == [], "nobody waits for what was not asked for"
    return found


def test_loads_take_the_time_of_their_bytes_one_after_the_other(device: PacedDevice, clock: Clock) -> None:
    for slot in range(3):
        submit(device, 0, slot)
    assert device.completed(waits=False) == []
    assert arrivals(device, clock, 3) == [(0, 4), (1, 8), (2, 12)]


def test_it_does_not_work_ahead_while_nothing_is_asked(device: PacedDevice, clock: Clock) -> None:
    clock.sleep(50)
    submit(device, 0)
    assert arrivals(device, clock, 1) == [(0, 54)]


def test_what_is_more_urgent_waits_for_one_chunk(device: PacedDevice, clock: Clock) -> None:
    submit(device, 9)
    clock.sleep(1.5)
    submit(device, 1)
    assert arrivals(device, clock, 2) == [(1, 6), (0, 8)]


def test_what_is_put_off_comes_later(device: PacedDevice, clock: Clock) -> None:
    reads = [submit(device, due) for due in range(3)]
    clock.sleep(0.5)
    device.reschedule(reads[1], 7)
    assert arrivals(device, clock, 3) == [(0, 4), (2, 8), (1, 12)]
    device.reschedule(reads[1], 9)  # it is there


def test_loads_go_on_while_others_compute(device: PacedDevice, clock: Clock) -> None:
    read = submit(device, 0)
    clock.sleep(10)
    assert device.completed(waits=False) == [read]
    assert (read.is_over, read.error) == (True, None)
    assert clock.now == pytest.approx(10, abs=0.01)


def test_a_cache_over_it_serves_who_was_asked_for() -> None:
    places = {(layer, expert): 10 * layer + expert for layer in range(2) for expert in range(4)}
    experts = {place: lambda x, step, add=None, place=place: x + place for place in places.values()}
    store = PacedExperts(4096, places, experts, 1e9)
    step: Step = None  # type: ignore[assignment]
    with ExpertCache(store, LeastRecent(), 2, 3) as cache:
        for layer, chosen in [(0, (1, 3)), (1, (0, 2)), (0, (0, 1)), (1, (2, 3))]:
            served = {
                expert: float(feed(torch.zeros(1), step))
                for expert, feed in cache.fetch(layer, chosen, is_prompt=False)
            }
            assert served == {expert: 10.0 * layer + expert for expert in chosen}
