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
from vivace.serve.choice import Choice
from vivace.serve.config import ServeConfig
from vivace.serve.grammar import binds_within
from vivace.serve.grammars import Grammars
from vivace.serve.tool_format import HERMES, rest_grammar
from vivace.serve.tool_reader import ToolReader

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


def test_a_model_without_tools_says_so(tmp_path: Path) -> None:
    engine = vivace.load(make_checkpoint(tmp_path / "bare"))
    with (
        local(engine, ServeConfig(served_model_name="tiny")) as reached,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        ask(reached.client())
    assert caught.value.param == "tools"
