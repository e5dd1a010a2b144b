"""The bars of a hostile load: each is missed for its own reason, and tables say so."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hostile import KINDS, ROUND, bars, growth
from benchmarks.hostile_answers import Known
from benchmarks.hostile_tables import tables

GOOD: dict[str, Any] = {
    "provenance": {"cpu": "A CPU", "num_cores": 2, "num_threads": 2, "commit": "abc"},
    "setting": {"model": "some-model", "seconds": 6.0, "clients": 16, "settles_s": 4},
    "kinds": {"greedy": {"sent": 1200, "outcomes": {"200": 1199, "429": 1}}},
    "statuses": {"200": 5, "400": 2},
    "num_equal": 4321, "num_wrong": 0, "num_5xx": 0, "num_stuck": 0, "faults": [],
    "server": {
        "sequences": {"received": 6.0, "finished": 4.0, "failed": 1.0, "cancelled": 1.0},
        "statuses": {"200": 6.0, "400": 2.0, "499": 1.0},
        "tokens": 99.0, "is_idle": True, "has_ended": False, "num_tracebacks": 0,
    },
    "loop_lag": {"p50_s": 0.001, "p99_s": 0.05, "max_s": 0.2, "share_on_time": 0.995},
    "health_lag": {"p50_s": 0.002, "p99_s": 0.03, "max_s": 0.11},
    "memory_mib": [100.0, 190.0, 200.0, 200.0, 205.0, 180.0, 200.0, 216.0],
}  # fmt: skip


def missed(report: dict[str, Any]) -> list[str]:
    return [bar.name for bar in bars(report) if not bar.is_met]


def test_a_good_run_misses_nothing() -> None:
    assert missed(GOOD) == []
    assert growth(GOOD) == pytest.approx((0.04, 0.08))


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda r: r.update(num_equal=0), "bystanders are answered as offline"),
        (lambda r: r.update(num_wrong=1), "nothing that must not be"),
        (lambda r: r.update(num_5xx=1), "no 5xx seen"),
        (lambda r: r["server"]["statuses"].update({"503": 1.0}), "no 5xx counted by the server"),
        (lambda r: r["server"].update(num_tracebacks=1), "no traceback in the log"),
        (lambda r: r.update(num_stuck=1), "every client came to its end"),
        (lambda r: r["server"].update(is_idle=False), "idle and alive afterwards"),
        (lambda r: r["server"].update(has_ended=True), "idle and alive afterwards"),
        (lambda r: r["server"]["sequences"].update(received=7.0), "every sequence is counted once"),
        (lambda r: r["statuses"].update({"400": 3}), "every status seen was counted"),
        (lambda r: r["loop_lag"].update(share_on_time=0.9899), "event loop, p99 below 100 ms"),
        (lambda r: r["health_lag"].update(p99_s=0.1), "/health, p99 below 100 ms"),
        (lambda r: r["memory_mib"].append(211.0), "memory within 5 %"),
    ],
)
def test_each_bar_is_missed_for_its_own_reason(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None], name: str
) -> None:
    report = deepcopy(GOOD)
    spoil(report)
    assert missed(report) == [name]
    path = tmp_path / "hostile.json"
    path.write_text(json.dumps(report | {"bars": [vars(bar) for bar in bars(report)]}))
    assert tables(path).count("**missed**") == 1


@pytest.mark.parametrize("seconds", [0, 1, 3, 4])
def test_a_run_too_short_for_its_memory_misses_that_bar_and_keeps_its_report(seconds: int) -> None:
    report = deepcopy(GOOD)
    report["memory_mib"] = report["memory_mib"][:seconds]
    assert missed(report) == ["memory within 5 %"]
    assert bars(report)[-1].found == "the run was too short"


def test_tables_are_written_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "hostile.json"
    assert tables(path) == "No result is committed yet."
    path.write_text(json.dumps(GOOD | {"bars": [vars(bar) for bar in bars(GOOD)]}))
    text = tables(path)
    assert "**16 clients for 6 seconds**, some-model, method `auto`; A CPU, 2 cores, commit abc." in text
    assert "| greedy | 1,200 | 200: 1,199; 429: 1 |" in text
    assert "| event loop, inside | at most 1 ms | at most 50 ms | 200.0 ms |" in text
    assert "4,321 answers" in text
    assert "missed" not in text


def test_sixteen_clients_are_of_all_kinds() -> None:
    assert len(ROUND) == 16
    assert set(ROUND) == set(KINDS)


def test_an_answer_that_differs_is_told() -> None:
    known = Known("/v1/completions", {"prompt": "a"}, {"token_ids": [1, 2], "text": "ab"})
    assert known.differs({"token_ids": [1, 2], "text": "ab", "index": 0}) is None
    assert "token_ids is [1, 3] where the engine gives [1, 2]" in str(
        known.differs({"token_ids": [1, 3], "text": "ab"})
    )
    assert "text is None" in str(known.differs({"token_ids": [1, 2]}))
