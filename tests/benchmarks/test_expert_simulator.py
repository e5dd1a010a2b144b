"""The simulator: conservation, limits, order of policies, and a run that can be done by hand."""

from __future__ import annotations

import operator
import random
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from benchmarks.expert_policies import LeastRecent, OnDemand, Oracle, Static
from benchmarks.expert_simulator import Machine, Simulated, simulate
from benchmarks.expert_traces import Prediction, ReusePrediction, Trace, Visit
from vivace.errors import ConfigError, CorruptError, NotFoundError
from vivace.storage.experts.policy import NextUse, Policy

LAYERS, EXPERTS, TOP_K = 8, 8, 2
MACHINE = Machine(1e9, 1_000_000, 24, layer_s=0.5e-3, expert_s=0.25e-3, latency_s=0.0, chunk_bytes=250_000)


def make_trace(passes: int = 40, recall: float = 0.9, seed: int = 0, sticky: float = 0.4) -> Trace:
    """Routers that repeat themselves now and then, and guesses two times ahead that are right with ``recall``."""
    draw, trace = random.Random(seed), Trace(LAYERS)
    last: dict[int, tuple[int, ...]] = {}
    for turn in range(passes):
        chosen = {}
        for layer in range(LAYERS):
            again = layer in last and draw.random() < sticky
            chosen[layer] = last[layer] if again else tuple(sorted(draw.sample(range(EXPERTS), TOP_K)))
        last = chosen
        for layer in range(LAYERS):
            for target in (2 * layer, 2 * layer + 1):
                if layer < target < LAYERS:
                    likely = [e if draw.random() < recall else draw.randrange(EXPERTS) for e in chosen[target]]
                    issued = turn * LAYERS + layer - 1
                    trace.predictions.append(Prediction(issued, turn * LAYERS + target, tuple(dict.fromkeys(likely))))
            trace.visits.append(Visit(turn * LAYERS + layer, False, chosen[layer]))
    return trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace()


def all_policies(trace: Trace, num_slots: int) -> list[tuple[Policy, bool]]:
    return [
        (OnDemand(), False),
        (LeastRecent(), False),
        (Static.of(trace, num_slots), False),
        (NextUse(LAYERS, EXPERTS), True),
        (Oracle(trace), False),
    ]


def run(trace: Trace, policy: Policy, guesses: bool, **changes: float) -> Simulated:
    return simulate(trace, policy, replace(MACHINE, **changes), guesses=guesses)


def test_by_hand() -> None:
    """Two layers, one expert each, nothing cached: a layer's 0.5 ms, the load's 1 ms and the expert's 0.25 ms."""
    trace = Trace(2, [Visit(0, False, (3,)), Visit(1, False, (4,))])
    assert simulate(trace, OnDemand(), MACHINE).total_s == pytest.approx(2 * 1.75e-3)
    late = replace(MACHINE, latency_s=0.1e-3)
    assert simulate(trace, OnDemand(), late).total_s == pytest.approx(2 * 1.85e-3)
    trace.predictions.append(Prediction(-1, 1, (4,)))  # starts at once; the demand for layer 0 goes first after a chunk
    ahead = simulate(trace, NextUse(2, EXPERTS), MACHINE)
    assert (ahead.misses, ahead.prefetched) == (1, 1)
    # At 0.5 ms two chunks of the guess are through; four of the demand; then two more, from 1.5 to 2.0 ms.
    assert ahead.total_s == pytest.approx(1.5e-3 + 0.25e-3 + 0.5e-3 + 0.25e-3)


@pytest.mark.parametrize("num_slots", [2, 8, 24, 64])
def test_conservation(trace: Trace, num_slots: int) -> None:
    uses = sum(len(visit.chosen) for visit in trace.visits)
    for policy, guesses in all_policies(trace, num_slots):
        out = run(trace, policy, guesses, num_slots=num_slots)
        assert out.uses == uses
        assert out.channel_s == pytest.approx(out.loads * 1e-3, rel=1e-2)
        assert out.channel_s <= out.total_s + 1e-3
        assert out.compute_s == pytest.approx(len(trace.visits) * 0.5e-3 + uses * 0.25e-3)
        assert max(out.channel_s, out.compute_s) <= out.total_s + 1e-3
        assert out.total_s <= out.channel_s + out.compute_s + 1e-9


@pytest.mark.parametrize("num_slots", [8, 16, 32])
def test_the_order_of_policies(trace: Trace, num_slots: int) -> None:
    times = [run(trace, p, g, num_slots=num_slots).total_s for p, g in all_policies(trace, num_slots)]
    on_demand, lru, _, ahead, oracle = times
    assert oracle <= ahead + 1e-9 <= lru <= on_demand


def test_with_room_for_all_caches_are_alike(trace: Trace) -> None:
    outs = [run(trace, p, g, num_slots=LAYERS * EXPERTS) for p, g in all_policies(trace, LAYERS * EXPERTS)[1:4]]
    assert {out.loads - out.wasted for out in outs} == {LAYERS * EXPERTS}


def test_a_channel_without_end_makes_no_difference(trace: Trace) -> None:
    times = {round(run(trace, p, g, bytes_per_s=inf).total_s, 9) for p, g in all_policies(trace, 24)}
    assert len(times) == 1


def test_a_guess_whose_layer_is_past_waits_for_demands() -> None:
    """The guess for layer 0 is wrong and half loaded; layer 1's expert goes before its other half."""
    trace = Trace(3, [Visit(0, False, ()), Visit(1, False, (4,)), Visit(2, False, ())], [Prediction(-1, 0, (7,))])
    out = simulate(trace, NextUse(3, EXPERTS), replace(MACHINE, layer_s=0.25e-3))
    assert out.total_s == pytest.approx(0.5e-3 + 1e-3 + 0.25e-3 + 0.25e-3)


def test_no_gain_beyond_the_bound(trace: Trace) -> None:
    for bandwidth in (0.3e9, 1e9, 4e9):
        for slots in (8, 24):
            lru = run(trace, LeastRecent(), False, bytes_per_s=bandwidth, num_slots=slots)
            for policy, guesses in all_policies(trace, slots):
                out = run(trace, policy, guesses, bytes_per_s=bandwidth, num_slots=slots)
                assert lru.total_s / out.total_s <= out.bound(lru) * 1.02


def test_better_guesses_are_faster() -> None:
    times = [run(make_trace(recall=recall), NextUse(LAYERS, EXPERTS), True).total_s for recall in (0.2, 0.6, 1.0)]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.05 * times[2]


def test_recall_counts_what_was_expected_in_time(trace: Trace) -> None:
    assert make_trace(recall=1.0).recall() == 1.0
    assert 0.85 < trace.recall() < 0.97
    with pytest.raises(AssertionError, match="no prediction"):
        Trace(2, [Visit(0, False, (1,))], [Prediction(0, 0, (1,))]).recall()


def test_what_was_thought_better_of_is_not_recalled() -> None:
    hints = [Prediction(-1, 1, (1, 2)), Prediction(-1, 2, (3,)), Prediction(0, 1, (5, 1))]
    visits = [Visit(0, False, (7,)), Visit(1, False, (1, 2)), Visit(2, False, (3, 4))]
    assert Trace(3, visits, hints).recall() == 0.5


def test_guesses_are_wasted_by_the_answer_that_made_them() -> None:
    """Expert 7 is loaded while an answer's second layer runs; the prompt behind it evicts it unused."""
    visits = [Visit(0, False, (0,)), Visit(1, False, (1,)), Visit(2, True, (2, 3)), Visit(3, True, (4, 5))]
    out = simulate(Trace(2, visits, [Prediction(0, 3, (7,))]), LeastRecent(), replace(MACHINE, num_slots=2))
    assert (out.loads, out.wasted) == (3, 1)
    assert out.channel_s == pytest.approx(3e-3)


def test_least_recent_takes_back_what_is_not_expected_any_more() -> None:
    policy, keys = LeastRecent(), [(0, 1), (0, 2)]
    for expert, clock in ((1, 0), (2, 2)):
        policy.used(0, [expert], clock, is_prompt=False)
    assert operator.gt(*policy.next_uses(keys, 3))
    policy.predicted(0, [1], 4)
    assert operator.lt(*policy.next_uses(keys, 3)), "it counts as fresh"
    policy.predicted(0, [3], 4)
    assert operator.gt(*policy.next_uses(keys, 3)), "another is expected instead"


def test_traces_come_back_from_disk(trace: Trace, tmp_path: Path) -> None:
    told = replace(trace, reuses=[ReusePrediction(-1, 2, 0, (1.25, 64.0)), ReusePrediction(7, 0, 1, (3.5, 2.0))])
    told.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == told
    with pytest.raises(NotFoundError, match="record one first"):
        Trace.load(tmp_path / "none.json")
    rows_instead = '{"num_layers": 1, "visits": [[0, 1, [2]]], "hints": [], "outlooks": []}'
    for bad in ('{"visits": 3}', rows_instead):
        (tmp_path / "bad.json").write_text(bad)
        with pytest.raises(CorruptError, match="is not a trace"):
            Trace.load(tmp_path / "bad.json")


def test_impossible_machines() -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        replace(MACHINE, num_slots=0)
    with pytest.raises(ConfigError, match="times must be >= 0"):
        replace(MACHINE, layer_s=-1.0)


def test_next_use_is_what_it_says_it_is() -> None:
    """When it is expected; else its layer's turn after the passes that a share says, which fades by .07 a pass, weighed
    against those that were foretold.
    """
    draw, policy = random.Random(3), NextUse(LAYERS, 40)
    used: dict[tuple[int, int], list[int]] = {}
    due: dict[tuple[int, int], int] = {}
    again: dict[tuple[int, int], float] = {}
    kinds = {"expected": 0, "foretold": 0, "often": 0}
    for clock in range(30 * LAYERS):
        layer, turn = clock % LAYERS, clock // LAYERS
        for expert in draw.sample(range(40), 2):
            policy.used(layer, [expert], clock, is_prompt=False)
            used.setdefault((layer, expert), []).append(turn)
        ahead = clock + draw.randrange(1, 4)
        likely = draw.sample(range(40), 3)
        policy.predicted(ahead % LAYERS, likely, ahead)
        due |= {(ahead % LAYERS, expert): ahead if expert in likely else -1 for expert in range(40)}
        if clock < 10 * LAYERS and draw.random() < 0.3:
            passes = [draw.uniform(0.5, 12) for _ in range(40)]
            policy.reuse_predicted(layer, passes, turn)
            again |= {(layer, expert): (turn + n) * LAYERS + layer for expert, n in enumerate(passes)}
        keys = [*used, (3, 39)]
        for key, use in zip(keys, policy.next_uses(keys, clock), strict=True):
            if due.get(key, -1) > clock:
                kinds["expected"] += 1
                assert use == due[key]
                continue
            share = 0.02
            for each in range(turn + 1):
                share = 0.02 + (share - 0.02) * 0.93 if each else share
                for _ in range(used.get(key, []).count(each)):
                    share += 0.07 * (1 - share)
            next_turn = next(c for c in range(clock + 1, clock + 1 + LAYERS) if c % LAYERS == key[0])
            idle, then = 1 / share, again.get(key, -1.0)
            if then > clock:
                idle = max(1.0, (then - next_turn) / LAYERS + 1) ** 0.4 * idle**0.6
            kinds["foretold" if then > clock else "often"] += 1
            assert use == pytest.approx(next_turn + LAYERS * (idle - 1) + 0.5)
    assert min(kinds.values()) > 100


def test_prompts_are_run_and_not_counted() -> None:
    """Nor is the pass that brings a prompt's token. Of the next one's experts one is there, the other takes 1 ms."""
    answer = [Visit(0, True, (1, 2)), Visit(1, False, (4,)), Visit(2, False, (2, 3))]
    out = simulate(Trace(1, answer), LeastRecent(), MACHINE)
    assert (out.num_passes, out.hits, out.misses, out.loads) == (1, 1, 1, 1)
    assert out.total_s == pytest.approx(0.5e-3 + 1e-3 + 0.25e-3)
    assert out.channel_s == pytest.approx(1e-3)
    again = [replace(visit, clock=visit.clock + 3) for visit in answer]
    assert simulate(Trace(1, answer + again), LeastRecent(), MACHINE).misses == 1
    warm = simulate(Trace(1, answer + again), LeastRecent(), MACHINE, warm_up=1)
    assert (warm.num_passes, warm.hits, warm.misses) == (1, 2, 0)


def test_while_a_prompt_runs_what_comes_first_in_answers_stays() -> None:
    """Expert 1 is in every pass but the first three of an answer, 0 only in those: the prompt keeps 0."""
    policy, order = NextUse(1, 4), []
    for answer in range(12):
        clock = 12 * answer
        policy.used(0, range(4), clock, is_prompt=True)
        order.append(operator.lt(*policy.next_uses([(0, 0), (0, 1)], clock)))
        for place in range(1, 12):
            policy.used(0, [int(place > 3), 2], clock + place, is_prompt=False)
            assert operator.lt(*policy.next_uses([(0, 2), (0, 3)], clock + place))
        policy.reuse_predicted(0, [40.0, 1.0, 2.0, 3.0], clock + 11)
    assert order[3:] == [True] * 9, "also where something was foretold of the answer before"
    assert not order[0], "nothing is known yet"
    policy.used(0, range(4), 12 * 12, is_prompt=True)
    policy.reuse_predicted(0, [9.0, 1.0, 2.0, 3.0], 12 * 12 + 1)
    assert operator.gt(*policy.next_uses([(0, 0), (0, 1)], 12 * 12)), "of this answer something else is foretold"


def test_what_is_not_expected_any_more_is_not_loaded() -> None:
    """Of three experts that are expected of layer 2 two are loaded or next when the third is thought better of."""
    visits = [Visit(clock, False, chosen) for clock, chosen in enumerate([(), (), (5,)])]
    trace = Trace(3, visits, [Prediction(-1, 2, (7, 6, 4)), Prediction(0, 2, (5,))])
    out = simulate(trace, NextUse(3, EXPERTS), replace(MACHINE, layer_s=0.9e-3))
    assert (out.loads, out.wasted, out.misses) == (3, 2, 0)


def test_a_good_outlook_saves_loads(trace: Trace) -> None:
    """Who is told when everything is chosen again, evicts nearly as well as one who knows the trace."""
    told = replace(trace, predictions=[])
    for turn in range(40):
        for layer in range(LAYERS):
            after = [visit for visit in trace.visits if visit.clock % LAYERS == layer and visit.clock // LAYERS > turn]
            passes = [
                next((visit.clock // LAYERS - turn for visit in after if expert in visit.chosen), 64)
                for expert in range(EXPERTS)
            ]
            told.reuses.append(ReusePrediction(turn * LAYERS - 1, layer, turn, tuple(map(float, passes))))
    lru, plain = run(trace, LeastRecent(), False), run(told, NextUse(LAYERS, EXPERTS), False)
    seeing, oracle = run(told, NextUse(LAYERS, EXPERTS), True), run(trace, Oracle(trace), False)
    assert seeing.loads - oracle.loads < 0.5 * (min(lru.loads, plain.loads) - oracle.loads)
