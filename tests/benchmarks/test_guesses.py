"""Drafters that ship guess as well as they did: tokens a target pass on packaged prompts, within bands from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import vivace
from benchmarks.guesses import FULL, SHORT, measure, shipped_methods
from vivace.engine import Engine

WRITTEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "results" / "guesses" / "shipped.json").read_text(encoding="utf-8")
)["methods"]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return vivace.load()


def is_within(found: dict[str, float], bands: dict[str, list[float]]) -> bool:
    """Every figure has a band, and lies in it."""
    assert found.keys() == bands.keys()
    return all(bands[name][0] <= value <= bands[name][1] for name, value in found.items())


@pytest.mark.parametrize("method", shipped_methods())
def test_a_pass_brings_as_many_tokens_as_ever(engine: Engine, method: str) -> None:
    """On few prompts."""
    assert is_within(measure(engine, method, SHORT), WRITTEN[method][str(SHORT)]["bands"])


@pytest.mark.slow
@pytest.mark.parametrize("method", shipped_methods())
def test_a_pass_brings_as_many_tokens_as_ever_on_all_prompts(engine: Engine, method: str) -> None:
    assert is_within(measure(engine, method), WRITTEN[method][str(FULL)]["bands"])


@pytest.mark.slow
def test_a_batch_is_drafted_for_as_well(engine: Engine) -> None:
    for method in shipped_methods():
        assert is_within(measure(engine, method, batch_size=5), WRITTEN[method][str(FULL)]["bands"]), method
