"""``auto`` on simulated machines: near the best fixed method, never far below plain, and back when texts change."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.methods.auto.simulated import Machine, Simulated
from vivace.methods.auto.drafter import EXPLORE
from vivace.methods.auto.measured import BUSY
from vivace.methods.auto.regime import Regime

LOOKUP = Simulated("lookup", 0.0, 0.05, 0.5, longest=5)
OWN = Simulated("own", 0.15, 0.03, 0.85)
DEAR = Simulated("dear", 2.0, 0.1, 0.9)

CELLS = {
    "own drafts pay": (LOOKUP, OWN),
    "lookup pays": (replace(LOOKUP, chance=0.85), OWN),
    "near ties": (replace(LOOKUP, chance=0.7), replace(OWN, chance=0.8)),
    "rows are dear": (replace(LOOKUP, row_s=0.3, chance=0.6), replace(OWN, row_s=0.3, chance=0.6)),
    "nothing pays": (replace(LOOKUP, chance=0.02), replace(OWN, chance=0.1)),
    "one is absurd": (LOOKUP, DEAR),
    "all are good": (replace(LOOKUP, chance=0.9), replace(OWN, chance=0.95), replace(OWN, name="other", chance=0.9)),
}


def test_once_measured_it_is_near_the_best() -> None:
    """Within five per cent in all kinds of machines and texts but one, within eight there too."""
    means = {}
    for cell, drafters in CELLS.items():
        best = max(1.0, *(drafter.best for drafter in drafters))
        machines = [Machine(drafters, seed) for seed in range(3)]
        for machine in machines:
            machine.run(200)
        means[cell] = sum(machine.run(1500) for machine in machines) / len(machines) / best
    assert sum(mean > 0.95 for mean in means.values()) >= len(CELLS) - 1, means
    assert min(means.values()) > 0.92, means


@pytest.mark.parametrize("seed", range(4))
def test_where_drafts_lose_it_is_never_far_below_plain(seed: int) -> None:
    """The first look at everything included, over a few answers."""
    machine = Machine(CELLS["nothing pays"], seed)
    assert machine.run(600) > 0.97
    absurd = Machine((DEAR,), seed)
    absurd.run(100)
    assert absurd.run(3000) > 0.97


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16])
def test_every_batch_has_its_own_best(batch: int) -> None:
    """Rows cost more in larger batches: what pays at one sequence does not at sixteen."""
    crowd = 0.02 * batch
    machine = Machine((replace(LOOKUP, row_s=crowd, chance=0.6), replace(OWN, row_s=crowd)), batch)
    machine.run(300, Regime(batch, is_drawn=batch > 2))
    best = max(1.0, *(drafter.best for drafter in machine.drafters))
    assert machine.run(2000, Regime(batch, is_drawn=batch > 2)) / batch > 0.95 * best


def test_it_changes_with_the_text_and_comes_back() -> None:
    texts = [(replace(LOOKUP, chance=0.9), OWN), (replace(LOOKUP, chance=0.05), OWN)]
    machine = Machine(texts[0], 0)
    for _ in range(3):
        for text in texts:
            machine.drafters = text
            machine.run(60)
            used = len(machine.used)
            machine.run(300)
            best = max(range(2), key=lambda i: text[i].best) + 1
            share = Counter(machine.used[used:])[best] / len(machine.used[used:])
            assert share > 0.75, (text, share)


def test_drafts_that_lost_are_found_again_when_they_pay() -> None:
    machine = Machine((replace(OWN, chance=0.1),), 0)
    machine.run(500)
    assert Counter(machine.used[-200:])[1] <= 10, "looks alone"
    machine.drafters = (OWN,)
    machine.run(400)
    assert machine.run(300) > 0.9 * OWN.best


def test_what_loses_much_is_looked_at_rarely_and_what_loses_little_often() -> None:
    machine = Machine((DEAR,), 0)
    machine.run(10_000)
    looks = Counter(machine.used)[1]
    near = Machine((replace(OWN, chance=0.12),), 0)
    near.run(10_000)
    assert 0 < looks < 40
    assert Counter(near.used)[1] > 5 * looks


def test_looking_costs_no_more_than_its_share() -> None:
    machine = Machine((LOOKUP, DEAR, OWN), 0, noise=0.0)
    machine.run(300)
    before, begun, own = len(machine.used), machine.now, 0
    machine.run(5000)
    own = Counter(machine.used[before:])[3]
    spent = machine.now - begun
    assert own / len(machine.used[before:]) > 0.85
    assert machine.tokens / machine.now > 0.95 * OWN.best
    assert spent >= 5000


def test_a_look_that_is_a_call_of_several_steps_costs_no_more_than_its_share() -> None:
    """Plain decoding and lookup make several steps a call, and all of them are spent on a look."""
    machine = Machine((replace(LOOKUP, chance=0.3), OWN), 0, noise=0.0, per_call=(5, 4, 1))
    machine.run(300)
    machine.spent.clear()
    machine.run(8000)
    lost = sum(
        machine.spent[other] * (1 - rate / OWN.best) for other, rate in ((0, 1.0), (1, machine.drafters[0].best))
    )
    assert 0 < lost / machine.spent.total() < 2 * 1.5 * EXPLORE


def test_a_machine_that_stands_still_once_changes_nothing() -> None:
    """A step that took ten minutes counts as one that took a few times as long as usual."""
    machine = Machine((OWN,), 0)
    machine.run(200)
    halted = machine.now
    machine.step(Regime(1), slow=lambda now: 600.0)
    assert machine.now - halted > 50 * BUSY
    used = len(machine.used)
    machine.run(100)
    assert Counter(machine.used[used:])[1] > 0.8 * len(machine.used[used:])


def test_a_machine_that_was_busy_while_it_began_is_measured_again() -> None:
    machine = Machine((OWN,), 0)
    machine.run(400, slow=lambda now: 40.0)
    machine.run(60)
    assert machine.run(300) > 0.85 * OWN.best


def test_the_same_steps_give_the_same_choices() -> None:
    machines = [Machine(CELLS["near ties"], 3) for _ in range(2)]
    for machine in machines:
        machine.run(500)
    assert machines[0].used == machines[1].used
    assert machines[0].now == machines[1].now
