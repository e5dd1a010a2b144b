"""The device that is not here: it takes the time of its bytes, the most urgent first, and a slot holds what came."""

from __future__ import annotations

import pytest
import torch

from benchmarks.paced_device import PacedDevice, PacedShelf
from vivace.core.step import Step
from vivace.storage.experts import ExpertCache
from vivace.storage.policies import LeastRecent

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
    return PacedDevice(CHUNKS * 100, 100, 100.0, clock, clock.sleep)


def arrivals(device: PacedDevice, clock: Clock, count: int) -> list[tuple[int, float]]:
    found: list[tuple[int, float]] = []
    while len(found) < count:
        found += [(slot, round(clock.now)) for slot, _ in device.finished(waits=True)]
    assert device.finished(waits=True) == [], "nobody waits for what was not asked for"
    return found


def test_loads_take_the_time_of_their_bytes_one_after_the_other(device: PacedDevice, clock: Clock) -> None:
    for slot in range(3):
        device.submit(slot, slot, 0, slot)
    assert device.finished(waits=False) == []
    assert arrivals(device, clock, 3) == [(0, 4), (1, 8), (2, 12)]


def test_it_does_not_work_ahead_while_nothing_is_asked(device: PacedDevice, clock: Clock) -> None:
    clock.sleep(50)
    device.submit(0, 0, 0, 0)
    assert arrivals(device, clock, 1) == [(0, 54)]


def test_what_is_more_urgent_waits_for_one_chunk(device: PacedDevice, clock: Clock) -> None:
    device.submit(0, 0, 9, 0)
    clock.sleep(1.5)
    device.submit(1, 0, 1, 0)
    assert arrivals(device, clock, 2) == [(1, 6), (0, 8)]


def test_what_is_put_off_comes_later(device: PacedDevice, clock: Clock) -> None:
    for slot in range(3):
        device.submit(slot, 0, slot, 0)
    clock.sleep(0.5)
    device.reschedule(1, 7)
    assert arrivals(device, clock, 3) == [(0, 4), (2, 8), (1, 12)]
    device.reschedule(1, 9)  # it is there


def test_loads_go_on_while_others_compute(device: PacedDevice, clock: Clock) -> None:
    device.submit(0, 0, 0, 0)
    clock.sleep(10)
    assert device.finished(waits=False) == [(0, None)]
    assert clock.now == pytest.approx(10, abs=0.01)


def test_a_cache_over_it_serves_who_was_asked_for() -> None:
    places = {(layer, expert): 10 * layer + expert for layer in range(2) for expert in range(4)}
    experts = {place: lambda x, step, add=None, place=place: x + place for place in places.values()}
    shelf = PacedShelf(4096, places, experts, 1e9)
    step: Step = None  # type: ignore[assignment]
    with ExpertCache(shelf, LeastRecent(), 2, 3) as cache:
        for layer, chosen in [(0, (1, 3)), (1, (0, 2)), (0, (0, 1)), (1, (2, 3))]:
            served = {
                expert: float(feed(torch.zeros(1), step))
                for expert, feed in cache.serve(layer, chosen, is_prompt=False)
            }
            assert served == {expert: 10.0 * layer + expert for expert in chosen}
