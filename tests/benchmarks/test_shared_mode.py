"""The shared mode beside a plain fine-tune: a model beside itself loses nothing, and its streams give its text."""

from __future__ import annotations

from dataclasses import replace

import vivace
from benchmarks.shared_mode import compare
from vivace.prompts import packaged_prompts


def test_a_model_beside_itself() -> None:
    engine = vivace.load()
    prompts = [replace(prompt, references=("a place to eat",)) for prompt in packaged_prompts("e2e")[:3]]
    told = compare(engine, engine, prompts, 1, 24)
    assert told["ratio"] == [1.0, 1.0, 1.0]
    assert told["agreement_with_plain_fine_tune"] == 1.0
    assert 0 < told["quality"]["shared"] == told["quality"]["plain"] <= 1
    assert told["streams"]["identical"]
    assert told["streams"]["num_prompts"] == 1
    assert told["num_prompts"] == 3


def test_where_nothing_is_right_there_is_no_ratio() -> None:
    engine = vivace.load()
    prompts = [replace(prompt, references=("zzzz",)) for prompt in packaged_prompts("e2e")[:2]]
    told = compare(engine, engine, prompts, 1, 8)
    assert told["quality"]["plain"] == 0
    assert told["ratio"] is None
