"""Budgets of trainings: all stages, and what nobody recorded is said to be so."""

from __future__ import annotations

import json

from benchmarks.trainings import recorded, training
from vivace.engine import SHIPPED


def test_facts_of_a_result_come_first() -> None:
    assert training("vivace-14m", "multirate", {"steps": 9, "minutes": 1.2}) == "9 steps, 1 min"


def test_all_stages_are_counted() -> None:
    assert training("vivace-14m", "multistream") == "1,483 steps (256 + 351 + 255 + 621), 85 min"
    assert training("vivace-14m", "medusa") == "511 steps, 20 min"
    assert training("vivace-14m", "multirate") == "steps not recorded (3 stages), 60 min"
    gates = "gates 600 steps + router (steps not recorded), minutes not recorded"
    assert training("vivace-14m", "dynamic@0.98") == gates


def test_a_twin_and_a_method_that_looks_up_first_have_the_same_weights() -> None:
    assert training("vivace-14m-x4", "medusa") == training("vivace-14m", "medusa")
    assert training("vivace-14m", "multirate+lookup") == training("vivace-14m", "multirate")


def test_what_nobody_recorded_is_said() -> None:
    assert training("some-model", "medusa") == training("some-model", "draft") == "not recorded"
    for method in ("plain", "lookup", "lookahead", "layerskip", "llama.cpp", "transformers"):
        assert training("some-model", method) == "none"
    assert training("some-model", "auto") == "that of its methods"


def test_everything_that_ships_has_its_facts() -> None:
    """The steps are the model card's, too."""
    card = (SHIPPED / "README.md").read_text(encoding="utf-8")
    found = recorded()["vivace-14m"]
    assert {path.name for path in (SHIPPED / "adapters").iterdir()} | {"draft"} <= set(found)
    for method in set(found) - {"uno"}:
        for stage in found[method]["stages"]:
            assert stage["steps"] is None or str(stage["steps"]) in card, f"{method}: {json.dumps(stage)}"
