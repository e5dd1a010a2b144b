"""Calls are found in answers however they are cut into pieces, and nothing is lost."""

from __future__ import annotations

import json

import pytest

from vivace.serve.tool_format import FORMATS, HERMES, LLAMA, MISTRAL, ToolFormat, format_of
from vivace.serve.tool_reader import ToolReader

ROME = '{"city": "Rome {\\"}", "days": [1, {"a": 2}]}'
CALL = f'{{"name": "look", "arguments": {ROME}}}'
BARE = f'{{"name": "look", "parameters": {ROME}}}'

CASES: dict[str, tuple[ToolFormat, str, str, list[tuple[str, str]]]] = {
    "text alone": (HERMES, "no <tool> here", "no <tool> here", []),
    "one": (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [("look", ROME)]),
    "behind text": (HERMES, f"Wait.\n<tool_call>\n{CALL}\n</tool_call>\n", "Wait.\n", [("look", ROME)]),
    "two": (HERMES, f"<tool_call>\n{CALL}\n</tool_call>\n" * 2, "", [("look", ROME)] * 2),
    "text behind": (HERMES, f"<tool_call>{CALL}</tool_call> So.", " So.", [("look", ROME)]),
    "another order": (
        HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')],
    ),
    "arguments as text": (
        HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')],
    ),
    "not a call": (HERMES, "<tool_call>{oh}</tool_call> no", "<tool_call>{oh}</tool_call> no", []),
    "cut in the name": (HERMES, '<tool_call>{"name": "lo', '<tool_call>{"name": "lo', []),
    "cut in arguments": (HERMES, '<tool_call>{"name": "f", "arguments": {"a', "", [("f", '{"a')]),
    "list": (MISTRAL, f"[TOOL_CALLS][{CALL}, {CALL}]", "", [("look", ROME)] * 2),
    "list of one": (MISTRAL, f"Hm [TOOL_CALLS] [{CALL}]", "Hm ", [("look", ROME)]),
    "bare": (LLAMA, BARE, "", [("look", ROME)]),
    "bare with a tag": (LLAMA, f"<|python_tag|>{BARE}; {BARE}", "", [("look", ROME)] * 2),
    "bare text": (LLAMA, f"Say {BARE}", f"Say {BARE}", []),
    "bare json": (LLAMA, '{"a": 1} and on', '{"a": 1} and on', []),
    "a name that is no text": (
        HERMES, '<tool_call>{"name": "get\\_it", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get\\_it", "arguments": {}}</tool_call>', [],
    ),
    "data with a name": (LLAMA, '{"name": "Alice", "age": 3}', '{"name": "Alice", "age": 3}', []),
    "data of another name": (
        LLAMA, '{"name": "Alice", "parameters": {"age": 3}}', '{"name": "Alice", "parameters": {"age": 3}}', [],
    ),
    "data in tags": (
        HERMES,
        '<tool_call>{"name": "f", "args": 1}</tool_call>', '<tool_call>{"name": "f", "args": 1}</tool_call>', [],
    ),
    "not closed before another": (HERMES, f"<tool_call>{CALL}\n<tool_call>{CALL}", "", [("look", ROME)] * 2),
    "not closed before text": (HERMES, f"<tool_call>{CALL}\nThat is all.", "\nThat is all.", [("look", ROME)]),
    "a key behind": (
        MISTRAL, f'[TOOL_CALLS][{CALL[:-1]}, "id": "a}}b"}}, {CALL}] So.', " So.", [("look", ROME)] * 2,
    ),
    "a key behind, bare": (LLAMA, f'{BARE[:-1]}, "why": "because"}}; {BARE}', "", [("look", ROME)] * 2),
    "a list of no calls": (MISTRAL, "[TOOL_CALLS] [this is none]", "[TOOL_CALLS] [this is none]", []),
    "a list that ends in none": (MISTRAL, f"[TOOL_CALLS][{CALL}, none]", ", none]", [("look", ROME)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_answers_are_divided(name: str, size: int) -> None:
    form, answer, text, calls = CASES[name]
    reader = ToolReader(form, names={"look", "f"})
    reads = [reader.push(answer[at : at + size]) for at in range(0, len(answer), size)]
    reads.append(reader.push("", is_last=True))
    assert "".join(read.text for read in reads) == text
    assert [(call.name, call.arguments) for call in reader.calls] == calls
    deltas = [delta for read in reads for delta in read.deltas]
    told = ["".join(d["function"]["arguments"] for d in deltas if d["index"] == place) for place in range(len(calls))]
    assert told == [arguments for _, arguments in calls], "streams carry the same"
    assert [delta["index"] for delta in deltas if "id" in delta] == list(range(len(calls)))


CUT = '<tool_call>{"name": "f", "arguments": {"a": "b'


@pytest.mark.parametrize(
    ("form", "answer", "is_cut"),
    [
        (HERMES, "text alone", False),
        (HERMES, '<tool_call>{"name": "f", "arguments": ', False),  # no call is known yet: it is text
        (HERMES, CUT, True),
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>\n{CUT}", True),
        (HERMES, f"<tool_call>\n{CALL}", False),
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call> So.", False),
        (MISTRAL, f"[TOOL_CALLS][{CALL}, {CALL[:-2]}", True),
        (MISTRAL, f"[TOOL_CALLS][{CALL}, {CALL}", False),
        (LLAMA, BARE[:-2], True),
        (LLAMA, BARE[:-1], False),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_arguments_that_were_cut_are_noticed(form: ToolFormat, answer: str, is_cut: bool, size: int) -> None:
    reader = ToolReader(form)
    for at in range(0, len(answer), size):
        reader.push(answer[at : at + size])
    reader.push("", is_last=True)
    assert reader.is_cut is is_cut


def test_arguments_come_while_they_are_written() -> None:
    reader = ToolReader(HERMES)
    assert not reader.push('<tool_call>\n{"name": "f", "argu').deltas
    assert [delta["function"] for delta in reader.push('ments": {"a": ').deltas] == [
        {"name": "f", "arguments": ""},
        {"arguments": '{"a": '},
    ]


@pytest.mark.parametrize("form", FORMATS)
def test_only_one(form: ToolFormat) -> None:
    call = json.dumps({"name": "f", form.key: {"a": 1}})
    inside = f"{form.before}{call}{form.after}"
    many = f"[{inside}{form.between}{inside}]" if form.is_list else f"{inside}{form.between}{form.tag}{inside}"
    for size in (1, 1000):
        reader = ToolReader(form, only_one=True)
        answer = form.tag + many
        text = "".join(reader.push(answer[at : at + size]).text for at in range(0, len(answer), size))
        assert (text + reader.push("", is_last=True).text, len(reader.calls)) == ("", 1)


def test_templates_tell_the_format() -> None:
    assert format_of('{% if tools %}...<tool_call>\n{"name": ...}') is HERMES
    assert format_of("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]") is MISTRAL
    assert format_of('{"name": function name, "parameters": dictionary}') is LLAMA
    assert format_of("<tool_call><function=f>") is None
    assert format_of("{{ tools }}") is None
