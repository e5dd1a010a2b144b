"""The benchmark of experts from disk: how far reads are slowed down, gains, and what is told of them."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

from benchmarks.expert_tables import headline, tables
from benchmarks.experts import named, pace, with_gains

SIZE = 1_000_000


def test_a_pace_is_a_speed_or_the_equal_one() -> None:
    assert pace("equal") == "equal"
    assert pace("0.5") == 0.5
    for word in ("0", "nan", "-1"):
        with pytest.raises(ArgumentTypeError, match="a device reads more"):
            pace(word)


def test_an_adapter_has_a_name() -> None:
    assert named("ahead=some/folder") == ("ahead", Path("some/folder"))
    for word in ("some/folder", "=folder", "ahead="):
        with pytest.raises(ArgumentTypeError, match="NAME=DIR is needed"):
            named(word)


def policy(name: str, times: list[float]) -> dict[str, Any]:
    counts = {"loads": 400, "wasted": 100, "loaded_bytes": 400 * SIZE, "device_bytes": 404 * SIZE}
    return {
        "policy": name,
        "ms_per_token": sum(times) / len(times),
        "ms_by_answer": times,
        "compute_ms_per_token": 10.0,
        "load_ms_per_token": 30.0 if name == "lru" else 20.0,
        "loads_per_token": 12.5,
        "simulated_ms_per_token": 1.5 * sum(times) / len(times) if name == "lru" else 30.0,
        **counts,
    }


def test_gains_are_of_all_answers_and_range_over_them(tmp_path: Path) -> None:
    rows = [
        policy("on_demand", [90.0, 60.0, 100.0]),
        policy("lru", [40.0, 20.0, 80.0]),
        policy("ahead", [20.0, 20.0, 32.0]),
        policy("oracle", [10.0, 20.0, 16.0]),
    ]
    ahead = with_gains(rows)[2]
    assert (ahead["over_lru"], ahead["over_lru_range"]) == (140 / 72, [1.0, 2.5])
    assert ahead["over_oracle"] == pytest.approx(46 / 72)
    assert ahead["over_on_demand"] == pytest.approx(250 / 72)
    assert ahead["bound_over_lru"] == (30 + 10) / 20

    settings = {"reader": "direct", "prompts": 2, "tokens": 8, "threads": 1}
    plan = {"count": None, "leads": [1, 2, 3], "at_least": 0.5}
    seen = {
        "ahead": {"config": {"rate": None, "forecast": 8, "leads": [3, 2]}, "plan": plan},
        "far": {"config": {"rate": 1.5, "forecast": 0, "leads": []}, "plan": plan | {"leads": []}},
    }
    run = {"share": 0.25, "pace_gb_per_s": None, "gb_per_s": 1.5, "policies": rows}
    report = {
        **{"num_experts": 384, "expert_bytes": SIZE, "device_gb_per_s": 1.5, "settings": settings, "runs": [run]},
        **{"foresight": seen, "is_paced": False, "provenance": {"cpu": "a processor", "commit": None}},
    }
    assert tables(tmp_path) == "No run is committed yet."
    (tmp_path / "some.json").write_text(json.dumps(report))
    text = tables(tmp_path)
    assert "**some**: 384 experts of 1.00 MB, direct reads of a file on a disk **whose own caches" in text
    assert "serve them as they may**: a probe before the run read 1.50 GB/s, 3 answers of 8 tokens at most" in text
    assert (
        "; ahead: no accelerated residual (`rate: null`), a forecast, taught routers 2 and 3 layer(s) early, routers "
        "as they are 1 layer(s) early; far: the accelerated residual at rate 1.5;" in text
    )
    assert "LRU loads for 30.0 ms a token and computes for 10.0." in text
    assert "The simulator is -64% to +96% off these rows." in text
    row = (
        "| ahead | 24.0 | 30.0 | +25% | 1.94x (1.00 to 2.50) | 0.64 | 3.47x | 2.00x | 12.5 | 25% | 0.52 GB/s | 1.010 |"
    )
    assert row in text
    assert "takes 83.3 ms depending on a cache that it does not have" in text
    assert "1 gains are above their own bound (oracle at 25%)" in text
    paced = report | {"is_paced": True, "runs": [run | {"pace_gb_per_s": 0.5, "gb_per_s": 0.5}]}
    (tmp_path / "some.json").write_text(json.dumps(paced))
    text = tables(tmp_path)
    assert "384 experts of 1.00 MB, **a stand-in device**: experts lie in memory, a load only waits" in text
    assert "stand-in device, loads at a stated 0.50 GB/s; LRU loads" in text
    assert "above their own bound" not in text
    assert text.endswith("| 12.5 | 25% | - | - |"), "nothing is read"


def test_the_headline_has_the_residuals_own_gain_in_the_same_sentence(tmp_path: Path) -> None:
    names = {"ahead": (1.45, 3.8, 0.77), "accelerated": (1.33, 3.5, 0.71)}
    rows = [
        {"policy": name, "over_lru": lru, "over_on_demand": cold, "over_oracle": best}
        for name, (lru, cold, best) in names.items()
    ]
    path = tmp_path / "paced.json"
    assert headline(path) == "No run is committed yet."
    origin = {"cpu": "a processor", "num_threads": 2, "commit": "abc+changes"}
    report = {"runs": [{"share": 0.5, "policies": rows}], "settings": {"threads": 1}, "provenance": origin}
    path.write_text(json.dumps(report))
    sentence = headline(path).split(". ")[0]
    assert sentence.startswith("On a stand-in device")
    assert "`ahead` is 1.45x as fast as LRU" in sentence
    assert "no accelerated residual in it (`rate: null`), and the accelerated residual itself gives 1.33x" in sentence
    assert "Measured on a processor, 1 thread, **from a tree with uncommitted changes**" in headline(path)
