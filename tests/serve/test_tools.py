"""Tools over HTTP: calls that are forced, calls that are found, and what a model that knows no tools says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI

import vivace
from tests.serve.conftest import Running, local
from tests.tiny_checkpoints import make_checkpoint
from vivace.decode.request import Emitted
from vivace.decode.stats import DecodeStats
from vivace.engine import Engine, Options
from vivace.serve.bodies import ChatBody
from vivace.serve.choice import Choice
from vivace.serve.config import ServeConfig
from vivace.serve.grammar import binds_within
from vivace.serve.grammars import Grammars
from vivace.serve.tool_format import HERMES, rest_grammar
from vivace.serve.tool_reader import ToolReader
from vivace.serve.tools import Tools

MESSAGES = [{"role": "user", "content": "Where is it open?"}]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {
            "type": "object",
            "properties": {"size": {"enum": ["small", "large"]}, "open": {"type": "boolean"}},
            "required": ["size", "open"],
            "additionalProperties": False,
        },
    },
}
WAIT = {"type": "function", "function": {"name": "wait"}}


def ask(client: OpenAI, **settings: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "tiny", "messages": MESSAGES, "tools": [LOOK, WAIT], "max_tokens": 120, **settings}
    )


@pytest.mark.parametrize("method", ["plain", "lookup", "multirate"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_forced_call_fits_its_schema(client: OpenAI, choice: Any, method: str) -> None:
    settings = {"tool_choice": choice, "parallel_tool_calls": False, "extra_body": {"method": method}}
    reply = ask(client, model="alpha", **settings).choices[0]
    assert reply.finish_reason == "tool_calls"
    assert reply.message.content is None
    (call,) = reply.message.tool_calls
    assert call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "look" or choice == "required"
    assert set(arguments) == ({"size", "open"} if call.function.name == "look" else set())


def test_a_stream_carries_the_same_calls(client: OpenAI) -> None:
    settings = {"tool_choice": "required", "temperature": 1.5, "seed": 4, "n": 2, "max_tokens": 200}
    whole = ask(client, **settings)
    calls: list[dict[int, list[str]]] = [{}, {}]
    ends = {}
    for chunk in ask(client, **settings, stream=True):
        part = chunk.choices[0]
        assert not part.delta.content
        for delta in part.delta.tool_calls or ():
            if delta.id:
                calls[part.index][delta.index] = [delta.function.name, ""]
            calls[part.index][delta.index][1] += delta.function.arguments
        ends[part.index] = part.finish_reason or ends.get(part.index)
    for choice in whole.choices:
        told = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls]
        assert [*calls[choice.index].values()] == told
        assert ends[choice.index] == choice.finish_reason


def test_a_free_model_may_answer_with_text(client: OpenAI) -> None:
    for settings in ({}, {"tool_choice": "auto"}):
        reply = ask(client, **settings, max_tokens=12).choices[0]
        assert reply.message.content
        assert reply.message.tool_calls is None
    without = ask(client, tool_choice="none", max_tokens=12)
    plain = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12)
    assert without.choices[0].message.content == plain.choices[0].message.content
    assert without.usage.prompt_tokens == plain.usage.prompt_tokens


def test_strict_binds_calls_of_a_free_model(engine: Engine) -> None:
    grammars = Grammars(engine.tokenizer, engine.model.config.vocab_size)
    function = LOOK["function"]
    lark = rest_grammar(HERMES, [("look", function["parameters"])])  # type: ignore[index]
    bound = binds_within(grammars, grammars.calls(lark, b""), HERMES)(2)
    draws = torch.Generator().manual_seed(0)
    text = engine.tokenizer.encode("Hm, <tool_cal")
    free = torch.randn(1, engine.model.config.vocab_size, generator=draws)
    assert torch.equal(bound(torch.tensor([[5, 5, *text]]), free), free), "text is free"
    tokens = engine.tokenizer.encode("Hm, <tool_call>")
    reader = ToolReader(HERMES)
    for _ in range(200):
        logits = torch.randn(1, engine.model.config.vocab_size, generator=draws)
        tokens.append(int(bound(torch.tensor([[5, 5, *tokens]]), logits).argmax()))
        if "</tool_call>" in engine.tokenizer.decode(tokens):
            break
    reader.push(engine.tokenizer.decode(tokens), is_last=True)
    assert set(json.loads(reader.calls[0].arguments)) == {"size", "open"}
    assert torch.equal(bound(torch.tensor([[5, 5, *tokens]]), free), free), "and free again behind the call"


@pytest.mark.parametrize("strict", [True, False])
def test_a_free_model_takes_strict_tools(client: OpenAI, strict: bool) -> None:
    tools = [{"type": "function", "function": {**LOOK["function"], "strict": strict}}]  # type: ignore[dict-item]
    assert ask(client, tools=tools, parallel_tool_calls=False, max_tokens=5).choices[0].message.content


def test_answers_of_tools_are_told_as_values(server: Running) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"size": "small"}'}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "closed"})
    with server.http() as http:
        tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        assert '"arguments": {"size": "small"}' in text
        assert text.endswith("closed")
        reply = http.post("/v1/chat/completions", json={"messages": messages, "tools": [LOOK], "max_tokens": 3})
        assert reply.status_code == 200


def told(text: str, number: int, **fields: Any) -> dict[str, Any]:
    """The answer of a tool to one of the calls of ``asked``."""
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text, **fields}


def asked(*names: str) -> list[dict[str, Any]]:
    """A conversation in which the model has called these functions."""
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for number, name in enumerate(names)
    ]
    return [*MESSAGES, {"role": "assistant", "tool_calls": calls}]


@pytest.mark.parametrize(
    "answers",
    [
        [told("look", 0), told("wait", 1)],
        [told("look", 0, name="look"), told("wait", 1, name="wait")],
        [told("look", 0), {"role": "user", "content": "And?"}, *asked("wait"), told("wait", 0)],
    ],
)
@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_answers_in_the_order_of_their_calls_need_no_names(server: Running, path: str, answers: Any) -> None:
    body = {"messages": [*asked("look", "wait"), *answers]}
    with server.http() as http:
        assert http.post(path, json=body | ({"max_tokens": 1} if "chat" in path else {})).status_code == 200


@pytest.mark.parametrize(
    ("answers", "field", "says"),
    [
        ([told("wait", 1), told("look", 0)], "2.tool_call_id", "in the same order"),
        ([told("look", 0), told("look", 0)], "3.tool_call_id", "in the same order"),
        ([told("look", 0), told("wait", 1), told("more", 2)], "4.tool_call_id", "in the same order"),
        ([told("look", 0, name="wait")], "2.name", "does not read 'name'; leave it out"),
        ([told("look", 0, status="ok")], "2.status", "does not read 'status'; leave it out"),
    ],
)
@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_answers_that_the_prompt_would_not_tell_apart_are_refused(
    server: Running, path: str, answers: Any, field: str, says: str
) -> None:
    with server.http() as http:
        reply = http.post(path, json={"messages": [*asked("look", "wait"), *answers]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == f"messages.{field}"
    assert says in reply.json()["error"]["message"]


def test_a_call_that_is_cut_off_says_length(client: OpenAI) -> None:
    reply = ask(client, tool_choice={"type": "function", "function": {"name": "look"}}, max_tokens=45).choices[0]
    assert reply.finish_reason == "length"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ('<tool_call>{"name": "look", "arguments": {"size": "small"}}</tool_call> So END', "tool_calls"),
        ('<tool_call>{"name": "look", "arguments": {"size": "END', "stop"),
        ("Nothing END", "stop"),
    ],
)
def test_a_call_that_a_stop_text_cuts_is_none_to_be_made(engine: Engine, answer: str, reason: str) -> None:
    request = engine.request("a", Options(stop_strings="END", method="plain"))
    choice = Choice(0, request, engine.tokenizer, "plain", reader=ToolReader(HERMES))
    tokens = tuple(engine.tokenizer.encode(answer))
    choice.take(Emitted(0, tokens, None, "stop", DecodeStats()))
    assert choice.reason == reason


@pytest.mark.parametrize(
    ("answer", "is_end"),
    [
        ('So: <tool_call>\n{"name": "look", "arguments": {"q": "a"}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "look", "arguments": {"q": "say </tool_call>', False),
        ('<tool_call>\n{"name": "look", "arguments": {"q": "say </tool_call>"}}\n</tool_call>', True),
        ('<tool_call>{"arguments": {}, "name": "look"}</tool_call>', True),
        ("A call ends with </tool_call>", False),
    ],
)
def test_an_answer_that_may_hold_one_call_ends_with_it(engine: Engine, answer: str, is_end: bool) -> None:
    """Not with a closing tag that its arguments or its text are about."""
    body = ChatBody.model_validate({"messages": MESSAGES, "tools": [LOOK], "parallel_tool_calls": False})
    tools = Tools(engine.tokenizer, Grammars(engine.tokenizer, engine.model.config.vocab_size))
    [request] = tools.ending([engine.request("a", Options(method="plain"))], HERMES, body)
    assert request.stop.stops_at(engine.tokenizer.encode(answer)) is is_end


def test_a_model_without_tools_says_so(tmp_path: Path) -> None:
    engine = vivace.load(make_checkpoint(tmp_path / "bare"))
    with (
        local(engine, ServeConfig(served_model_name="tiny")) as reached,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        ask(reached.client())
    assert caught.value.param == "tools"


def test_a_template_says_which_fields_have_an_effect(tmp_path: Path) -> None:
    """One that reads neither calls nor names, and then one that reads names."""
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "a", "name": "Ann"}]},
        {"messages": asked("look")},
    ]
    folder = make_checkpoint(tmp_path / "bare")
    refused: list[list[str | None]] = []
    for template in ("{{ messages[-1].content }}", "{{ messages[-1].name }}: {{ messages[-1].content }}"):
        (folder / "chat_template.jinja").write_text(template)
        with local(vivace.load(folder), ServeConfig()) as reached, reached.http() as http:
            replies = [http.post("/v1/chat/completions", json={**body, "max_tokens": 1}).json() for body in bodies]
        refused.append([reply.get("error", {}).get("param") for reply in replies])
    assert refused == [["messages.0.name", "messages.1.tool_calls"], [None, "messages.1.tool_calls"]]
