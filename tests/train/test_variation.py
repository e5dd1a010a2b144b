"""Invented words, respelled values, shuffled lists, exercises."""

from __future__ import annotations

import random
import re

import pytest

from vivace.errors import ConfigError
from vivace.train.variation import Variation, VariationConfig, copying_exercises

NAME = r"(?:name|near)\[([^\]]+)\]"
VALUE = r'[=<>] ("?)([^"]*?)(?="? AND |"? ;$)'
MEANING = ("Describe: name[Fen House], near[The Weir]", "Fen House is near The Weir.")
QUERY = (
    "Write SQL for: who rode for team north star? Columns: RIDER, TEAM, YEAR",
    'SELECT RIDER FROM TABLE WHERE TEAM = "North Star" AND YEAR = 1999 ;',
)


def make(**changes: object) -> Variation:
    return Variation(VariationConfig(values=(NAME, VALUE), **changes), [MEANING, QUERY])  # type: ignore[arg-type]


def test_the_answer_takes_the_prompts_spelling() -> None:
    prompt, answer = make(respell=True).respelled(QUERY)
    assert prompt == QUERY[0]
    assert answer == 'SELECT RIDER FROM TABLE WHERE TEAM = "north star" AND YEAR = 1999 ;'
    assert make(respell=False).respelled(QUERY) == QUERY


def test_invented_values_stand_in_both_and_nothing_else_changes() -> None:
    variation = make(invent=1.0)
    changed = 0
    for seed in range(30):
        prompt, answer = variation.drawn(MEANING, random.Random(seed))
        name, near = re.findall(NAME, prompt)
        assert answer == f"{name} is near {near}."
        changed += name != "Fen House"
    assert changed > 20


def test_parts_of_longer_words_stay_as_they_are() -> None:
    variation = make(invent=1.0)
    for seed in range(30):
        prompt, answer = variation.drawn(("Describe: name[Fen]", "Fen is in the Fenlands."), random.Random(seed))
        assert answer == f"{re.findall(NAME, prompt)[0]} is in the Fenlands."
        assert variation.drawn(("name[Fen] of Fenlands", "The Fenlands"), random.Random(seed))[1] == "The Fenlands"


def test_invented_words_keep_their_kind() -> None:
    rng = random.Random(0)
    variation = make(invent=1.0)
    for kind in ("north", "North", "NORTH", "1999", "7"):
        word = variation._word_like(kind, rng)
        assert (word.isdigit(), word.islower(), word.isupper()) == (kind.isdigit(), kind.islower(), kind.isupper())
        assert not kind.isdigit() or len(word) == len(kind)


def test_lists_get_another_order() -> None:
    variation = make(shuffle=r"Columns: (.*)$")
    seen = {variation.drawn(QUERY, random.Random(seed))[0].split("Columns: ")[1] for seed in range(40)}
    assert len(seen) > 3
    assert {tuple(sorted(columns.split(", "))) for columns in seen} == {("RIDER", "TEAM", "YEAR")}


def test_a_prompt_without_the_list_stays_as_it_is() -> None:
    variation = make(shuffle=r"who rode(?: for (.*))?$")
    alone = ("who rode", "SELECT RIDER FROM TABLE ;")
    assert {variation.drawn(alone, random.Random(seed)) for seed in range(8)} == {alone}


def test_exercises_repeat_what_the_prompt_says() -> None:
    made = copying_exercises([MEANING], 5.0, make(), random.Random(0))
    assert len(made) == 5
    for prompt, answer in made:
        assert answer == ", ".join(re.findall(NAME, prompt))
    assert copying_exercises([("Hi", "Ho")], 3.0, make(), random.Random(0)) == []


def test_exercises_keep_the_prompts_order_where_invented_values_are_alike() -> None:
    """With few words to invent from, one value is often a part of another, or one that only the answer has."""
    few = Variation(VariationConfig(values=(NAME,)), [("", "Fen Weir Er")])
    pair = ("Describe: name[Al Fo], near[Burgerhouse], near[Ivy Hall]", "name[er], near[We] and so on")
    made = copying_exercises([pair], 400.0, few, random.Random(0))
    assert len(made) == 400
    for prompt, answer in made:
        assert answer == ", ".join(re.findall(NAME, prompt))


@pytest.mark.parametrize(
    "changes", [{"invent": 1.5}, {"values": ("name",)}, {"values": ("(",)}, {"shuffle": "Columns"}]
)
def test_an_impossible_configuration_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="variation"):
        VariationConfig(**changes)  # type: ignore[arg-type]
