"""Frames are compared by what they say, and a text that is none has nothing right."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vivace.errors import ConfigError
from vivace.evaluate.frames import Frame, frame_scores, write_frame
from vivace.evaluate.quality import score
from vivace.prompts import Prompt

TEXTS = st.text(min_size=1).filter(str.strip)
FILLED = st.lists(st.tuples(TEXTS, TEXTS))
WANTED = '{"intent": "Book", "slots": {"city": ["Lyon", "Bern"], "size": "four"}}'


@given(TEXTS, FILLED)
def test_what_is_written_is_read(intent: str, filled: list[tuple[str, str]]) -> None:
    assert Frame.read(write_frame(intent, filled)) == Frame.of(intent, filled)


@given(TEXTS, FILLED)
def test_order_case_and_spaces_do_not_count(intent: str, filled: list[tuple[str, str]]) -> None:
    turned = [(name, f" {text}  ") for name, text in reversed(filled)]
    assert Frame.of(intent, filled) == Frame.of(intent, turned)
    assert Frame.of("a", [("b", "New  York")]) == Frame.of("a", [("b", "new york")])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Book",
        "[]",
        '{"intent": "Book"}',
        '{"intent": "Book", "slots": []}',
        '{"intent": 1, "slots": {}}',
        '{"intent": "Book", "slots": {"size": 4}}',
        '{"intent": "Book", "slots": {}, "more": 1}',
        WANTED + " and more",
        pytest.param("[" * 5000, id="deep"),
    ],
)
def test_what_is_no_frame_has_nothing_right(text: str) -> None:
    assert Frame.read(text) is None
    assert frame_scores([text], [WANTED]) == {"exact_match": 0, "intent_accuracy": 0, "slot_f1": 0}


def test_scores_count_frames_intents_and_slots() -> None:
    said = [
        '{"slots": {"size": "Four", "city": ["bern", "Lyon"]}, "intent": "Book"}',  # right
        '{"intent": "Book", "slots": {"city": "Lyon", "when": "now"}}',  # one slot of two, and of three
        '{"intent": "Play", "slots": {"city": ["Lyon", "Lyon"]}}',  # of two equal ones one is right
        "?",
    ]
    # 3 + 1 + 1 slots are right of 3 + 2 + 2 that are said and 4 * 3 that are wanted
    found = frame_scores(said, [WANTED] * 4)
    assert found == {"exact_match": 0.25, "intent_accuracy": 0.5, "slot_f1": pytest.approx(2 * 5 / (7 + 12))}
    assert frame_scores(['{"intent": "a", "slots": {}}'], [json.dumps({"intent": "b", "slots": {}})])["slot_f1"] == 1


def test_a_reference_that_is_no_frame_is_named() -> None:
    with pytest.raises(ConfigError, match=r"a reference is no frame.*Book a table"):
        frame_scores([WANTED], ["Book a table"])


def test_tasks_of_an_assistant_get_their_metrics() -> None:
    rows = [Prompt("a", (WANTED,), "snips"), Prompt("b", ("translate",), "clinc"), Prompt("c", ("greeting",), "clinc")]
    found = score(rows, [WANTED, " translate\n", "translate"])
    assert found["snips"] == {"num_texts": 1, "exact_match": 1, "intent_accuracy": 1, "slot_f1": 1}
    assert found["clinc"] == {"num_texts": 2, "exact_match": 0.5}
