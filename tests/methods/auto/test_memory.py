"""What ``auto`` has measured is there in the next run, whoever else writes the file and whatever has become of it."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.methods.auto.simulated import Machine, Simulated
from vivace.methods.auto.drafter import SAVE_STEPS, _keep_last
from vivace.methods.auto.measured import Measured, Sums
from vivace.methods.auto.memory import FILE, MOST_DRAFTERS, MOST_PLACES, KeptMeasurements, report
from vivace.methods.auto.regime import Regime, length_class, nearest

OWN = Simulated("own", 0.15, 0.03, 0.85)
LOOKUP = Simulated("lookup", 0.0, 0.05, 0.5)


def worked(memory: KeptMeasurements, *drafters: Simulated) -> Machine:
    """A machine that has decoded for a while and kept what it measured."""
    machine = Machine(drafters or (LOOKUP, OWN), memory=memory)
    machine.run(300)
    machine.auto.keep()
    return machine


def measured(rate: float = 1.0) -> dict[str, tuple[Sums, int]]:
    arm = Measured()
    for _ in range(4):
        arm.record([0], 1 / rate, 0, [0])
    return {"plain": (arm.usual, arm.steps)}


def test_the_next_run_begins_where_this_one_ended(tmp_path: Path) -> None:
    memory = KeptMeasurements(tmp_path, "here")
    worked(memory)
    later = Machine((LOOKUP, OWN), 1, KeptMeasurements(tmp_path, "here"))
    later.run(30)
    assert set(later.used) == {2}, "nothing is measured that is known"
    elsewhere = Machine((LOOKUP, OWN), 1, KeptMeasurements(tmp_path, "another machine"))
    elsewhere.run(30)
    assert set(elsewhere.used) == {0, 1, 2}


def test_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    machine = worked(KeptMeasurements(tmp_path, "here"))
    for (regime, index), arm in machine.auto._measured.items():
        usual, steps = KeptMeasurements(tmp_path, "here").read()[regime][["plain", "lookup", "own"][index]]
        assert steps == arm.steps
        np.testing.assert_allclose(usual.numbers, arm.usual.numbers, rtol=1e-5)


def test_a_line_through_no_time_comes_back(tmp_path: Path) -> None:
    """Steps that take as long as they have guesses, or more: the line says that one without takes none."""
    arm = Measured()
    for guesses, seconds in ((4, 0.02), (6, 0.04), (8, 0.08)):
        arm.record([guesses], seconds, 8, [guesses])
    assert arm.usual.seconds(0) < 1e-8
    memory = KeptMeasurements(tmp_path, "here")
    assert memory.write({Regime(1): {"lookup": (arm.usual, arm.steps)}})
    assert memory.read()[Regime(1)]["lookup"][1] == arm.steps


def test_a_new_drafter_is_measured_beside_those_that_are_known(tmp_path: Path) -> None:
    worked(KeptMeasurements(tmp_path, "here"), LOOKUP)
    later = Machine((LOOKUP, OWN), 1, KeptMeasurements(tmp_path, "here"))
    later.run(30)
    assert later.used[:4] == [2, 2, 2, 2], "once to warm up, which does not count, and three times"


def test_other_weights_of_a_method_have_measurements_of_their_own(tmp_path: Path) -> None:
    memory = KeptMeasurements(tmp_path, "here")
    first = Machine((OWN,), memory=memory, weights={OWN.name: "aaaa"})
    first.run(300)
    first.auto.keep(is_last=True)
    other = Machine((OWN,), memory=memory, weights={OWN.name: "bbbb"})
    assert (Regime(1), 1) not in other.auto._measured
    again = Machine((OWN,), memory=memory, weights={OWN.name: "aaaa"})
    assert again.auto._measured[Regime(1), 1].steps == first.auto._measured[Regime(1), 1].steps


def test_a_run_with_fewer_drafters_leaves_what_is_known_of_the_others(tmp_path: Path) -> None:
    memory = KeptMeasurements(tmp_path, "here")
    worked(memory)
    before = memory.read()[Regime(1)]
    worked(memory, LOOKUP)
    after = memory.read()[Regime(1)]
    assert set(after) == set(before)
    assert after["own"][1] == before["own"][1]
    for number in range(40):
        assert memory.write({Regime(1): {f"own ({number})": before["own"]}})
    assert len(memory.read()[Regime(1)]) == MOST_DRAFTERS


def test_padded_passes_are_a_regime_of_their_own() -> None:
    padded = Regime(1, is_padded=True)
    assert Regime.of_key(padded.key) == padded != Regime.of_key(Regime(1).key) == Regime(1)
    assert nearest(Regime(2), [padded]) is None
    assert nearest(Regime(2, is_padded=True), [padded]) == padded


def test_what_has_changed_since_is_found_out(tmp_path: Path) -> None:
    """The file says that drafts pay here, and they do not any more."""
    worked(KeptMeasurements(tmp_path, "here"))
    later = Machine((replace(LOOKUP, chance=0.02), replace(OWN, chance=0.02)), 1, KeptMeasurements(tmp_path, "here"))
    later.run(400)
    assert later.used[-40:].count(0) > 24


def test_little_is_not_worth_a_file(tmp_path: Path) -> None:
    machine = Machine((OWN,), memory=KeptMeasurements(tmp_path, "here"))
    while machine.auto._unsaved < SAVE_STEPS - 1:
        machine.step(Regime(1))
    machine.auto.keep()
    assert not (tmp_path / FILE).exists()
    machine.step(Regime(1))
    machine.auto.keep()
    assert (tmp_path / FILE).exists()


def test_what_is_measured_just_before_the_end_is_kept(tmp_path: Path) -> None:
    """The file is written every few seconds at most; a process that ends writes once more."""
    machine = worked(KeptMeasurements(tmp_path, "here"))
    machine.auto._saved_at = math.inf  # as if it had been written just now
    regime = Regime(4)
    for _ in range(SAVE_STEPS):
        machine.step(regime)
    machine.auto.keep()
    assert regime not in KeptMeasurements(tmp_path, "here").read()
    _keep_last(weakref.ref(machine.auto))
    assert regime in KeptMeasurements(tmp_path, "here").read()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 1}',
        '{"format": 99, "places": {}}',
        '{"format": 1, "places": {"here": 7}}',
        '{"format": 1, "places": {"here": {"1 greedy 0": {"plain": [1, 2]}}}}',
        '{"format": 1, "places": {"here": {"0 greedy 0": {}}}}',
        '{"format": 1, "places": {"here": {"one": {}}}}',
        json.dumps({"format": 1, "places": {"here": {"1 greedy 0": {"plain": [3, *[float("nan")] * 29]}}}}),
        json.dumps({"format": 1, "places": {"here": {"1 greedy 0": {"plain": [3, *[0] * 29]}}}}),
        json.dumps({"format": 1, "places": {"here": {"1 greedy 0": {"plain": [1e400, *[1] * 29]}}}}),
        "[" * 100_000,
    ],
)
def test_a_damaged_file_means_measuring_anew_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (tmp_path / FILE).write_text(text)
    memory = KeptMeasurements(tmp_path, "here")
    with caplog.at_level(logging.WARNING):
        machine = worked(memory)
    assert len(caplog.records) == 1
    assert "measures anew" in caplog.text
    assert set(machine.used) == {0, 1, 2}
    assert KeptMeasurements(tmp_path, "here").read(), "the next run has something to begin with"


def test_a_place_that_makes_no_sense_leaves_the_others(tmp_path: Path) -> None:
    KeptMeasurements(tmp_path, "there").write({Regime(1): measured()})
    found = json.loads((tmp_path / FILE).read_text())
    found["places"]["here"] = {"1 greedy 0": "fast"}
    (tmp_path / FILE).write_text(json.dumps(found))
    KeptMeasurements(tmp_path, "here").write({Regime(1): measured(2.0)})
    assert KeptMeasurements(tmp_path, "there").read()
    assert KeptMeasurements(tmp_path, "here").read()[Regime(1)]["plain"][0].seconds(0) == pytest.approx(0.5)


def test_a_folder_that_cannot_be_written_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    memory = KeptMeasurements(tmp_path / "file" / "cache", "here")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert memory.write({Regime(1): measured()})
    assert len(caplog.records) == 1


def test_who_comes_while_another_writes_leaves_it_for_later(tmp_path: Path) -> None:
    memory = KeptMeasurements(tmp_path, "here")
    with memory._alone():
        assert not KeptMeasurements(tmp_path, "there").write({Regime(1): measured()})
    assert KeptMeasurements(tmp_path, "there").write({Regime(1): measured()})


def test_places_that_were_not_written_for_long_leave(tmp_path: Path) -> None:
    for number in range(MOST_PLACES + 3):
        KeptMeasurements(tmp_path, str(number)).write({Regime(1): measured()})
    kept = [bool(KeptMeasurements(tmp_path, str(number)).read()) for number in range(MOST_PLACES + 3)]
    assert kept == [False] * 3 + [True] * MOST_PLACES


def _write(folder: Path, place: str, count: int) -> None:
    for number in range(count):
        while not KeptMeasurements(folder, place).write({Regime(number + 1): measured()}):
            pass


def test_two_processes_that_write_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path, place, 20)) for place in ("here", "there")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    for place in ("here", "there"):
        assert sorted(regime.batch for regime in KeptMeasurements(tmp_path, place).read()) == list(range(1, 21))
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_the_report_names_the_fastest_of_each_regime(tmp_path: Path) -> None:
    memory = KeptMeasurements(tmp_path, "here")
    assert "nothing measured" in report(memory)
    machine = worked(memory)
    machine.run(100, Regime(4, is_drawn=True, length=2))
    machine.auto.keep()
    line = report(KeptMeasurements(tmp_path, "here"))
    assert line.startswith("batch 1: own, 2."), line
    assert "batch 4, drawn, texts of 1024 tokens and more: own" in line


def test_classes_of_lengths() -> None:
    assert [length_class(n) for n in (0, 255, 256, 1023, 1024, 4095, 4096, 16384)] == [0, 0, 1, 1, 2, 2, 3, 4]
    for regime in (Regime(1), Regime(16, is_drawn=True, length=3)):
        assert Regime.of_key(regime.key) == regime
