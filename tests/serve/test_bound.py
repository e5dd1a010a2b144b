"""An answer that is bound to a grammar keeps to it, or is an error: never free text with status 200."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

import vivace
from tests.serve.conftest import local
from vivace.checkpoint.tokenizer import Tokenizer, load_tokenizer
from vivace.engine import Engine
from vivace.serve.api_error import APIError
from vivace.serve.config import ServeConfig
from vivace.serve.grammar import Binding, Bound, binds_within
from vivace.serve.grammars import Grammars
from vivace.serve.tool_format import HERMES, rest_grammar

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 200}
SIZE = {"type": "object", "properties": {"size": {"enum": ["small"]}}, "required": ["size"]}
CLOSED = {**SIZE, "additionalProperties": False}
CALL = {"type": "function", "function": {"name": "look", "parameters": CLOSED}}
WIDE = {"anyOf": [
    {"type": "object", "properties": {f"k{place}": {"type": "integer"}}, "required": [f"k{place}"]}
    for place in range(2500)
]}  # fmt: skip
"""Behind its first brace there are more ways on than llguidance follows."""
LATE = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 70, "maxLength": 70, "pattern": "^[ab]*$"}, "wide": WIDE},
    "required": ["text", "wide"],
    "additionalProperties": False,
}
"""The same, where an answer comes to it after a while."""


def schema(of: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": of}}}


def post(http: httpx2.Client, **fields: Any) -> Any:
    return http.post("/v1/chat/completions", json={**CHAT, **fields})


@pytest.mark.parametrize(
    "more", [{"ignore_eos": True}, {"min_tokens": 100}, {"stop": "name"}, {"stop": ["x"]}, {"stop_token_ids": [40]}]
)
@pytest.mark.parametrize(
    "binding",
    [schema(CLOSED), {"response_format": {"type": "json_object"}}, {"tools": [CALL], "tool_choice": "required"}],
)
def test_what_ends_an_answer_elsewhere_than_the_grammar_is_refused(
    http: httpx2.Client, binding: dict[str, Any], more: dict[str, Any]
) -> None:
    reply = post(http, **binding, **more)
    assert reply.status_code == 400, reply.json()["choices"]
    assert reply.json()["error"]["param"] == next(iter(more))
    assert "ends where" in reply.json()["error"]["message"]


def test_stop_texts_of_the_checkpoint_do_not_cut_what_is_bound(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "tiny", tmp_path / "stops")
    (tmp_path / "stops" / "generation_config.json").write_text(json.dumps({"stop_strings": ["size"]}))
    with local(vivace.load(tmp_path / "stops"), ServeConfig()) as reached, reached.http() as http:
        choice = post(http, **schema(CLOSED)).json()["choices"][0]
    assert (json.loads(choice["message"]["content"]), choice["finish_reason"]) == ({"size": "small"}, "stop")


def test_neutral_values_bind_nothing(http: httpx2.Client) -> None:
    plain = {"response_format": {"type": "text"}, "ignore_eos": True, "max_tokens": 3}
    assert post(http, **plain).status_code == 200
    assert post(http, **schema(CLOSED), ignore_eos=False, min_tokens=0, stop=[], stop_token_ids=[]).status_code == 200
    free = {"tools": [CALL], "tool_choice": "auto", "min_tokens": 2, "max_tokens": 3}
    assert post(http, **free).status_code == 200


@pytest.mark.parametrize(
    "of",
    [
        WIDE,
        {"type": "integer", "multipleOf": 99991, "minimum": 0, "maximum": 10**17},
        {"anyOf": [{"$ref": "#"}]},
        {"type": "object", "properties": {f"k{place}": {"type": "string"} for place in range(1500)}},
        {"type": "string", "const": "x" * 60_000},
    ],
    ids=["wide", "number", "endless", "properties", "long"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_beyond_the_limits_is_an_error_before_the_first_token(
    http: httpx2.Client, of: dict[str, Any], stream: bool
) -> None:
    reply = post(http, **schema(of), stream=stream)
    assert reply.status_code == 400, reply.text[:300]
    error = reply.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "response_format")
    assert "cannot be used" in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400


def test_a_grammar_that_stops_later_is_an_error_and_no_text(http: httpx2.Client) -> None:
    reply = post(http, **schema(LATE))
    assert reply.status_code == 400, reply.json()
    assert reply.json()["error"]["code"] == "grammar_stopped"
    lines = post(http, **schema(LATE), stream=True).text.splitlines()
    parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert parts[-1]["error"]["code"] == "grammar_stopped"
    text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts[:-1])
    assert re.fullmatch(r'{"text": "[ab]{60,70}("(, ("w.*)?)?)?', text), "nothing is made up"
    assert not any(part["choices"][0]["finish_reason"] for part in parts[:-1])


@pytest.fixture
def grammars(engine: Engine) -> Grammars:
    return Grammars(engine.tokenizer, engine.model.config.vocab_size)


def within(grammars: Grammars, arguments: dict[str, Any]) -> Binding:
    """Bound within calls of one function."""
    return binds_within(grammars, grammars.calls(rest_grammar(HERMES, [("look", arguments)]), b""), HERMES)(0)


def test_decided_tokens_that_do_not_fit_are_an_error(engine: Engine, grammars: Grammars) -> None:
    """A guess that does not fit is nothing: its own row barred it. What was decided is another matter."""
    bound = Bound(grammars.json_schema(CLOSED, b""), 0)
    good, bad = engine.tokenizer.encode('{"size": "sm'), engine.tokenizer.encode('{"size": "xl')
    free = torch.zeros(1, engine.model.config.vocab_size)
    assert torch.equal(bound(torch.tensor([bad]), free), free)
    assert bound.keeps_to(good) is False
    with pytest.raises(APIError, match="response_format") as caught:
        bound.keeps_to(bad)
    assert caught.value.code == "grammar_stopped"
    assert bound.keeps_to(good) is False, "the next answer is not concerned"


def test_decided_calls_that_do_not_fit_are_an_error(engine: Engine, grammars: Grammars) -> None:
    bound = within(grammars, CLOSED)
    encode = engine.tokenizer.encode
    call = '<tool_call>\n{"name": "look", "arguments": {"size": "small"}}\n</tool_call>'
    assert bound.keeps_to(encode(f"some text {call} and text")) is False
    assert bound.keeps_to(encode(f"{call}{call[:40]}")) is False
    with pytest.raises(APIError, match="tools"):
        bound.keeps_to(encode(f"{call}\n" + call.replace("small", "large")))


def test_a_closing_tag_inside_a_text_closes_nothing(engine: Engine, grammars: Grammars) -> None:
    parameters = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    bound = within(grammars, parameters)
    written = '<tool_call>\n{"name": "look", "arguments": {"q": "</tool_call> and'
    logits = bound(torch.tensor([engine.tokenizer.encode(written)]), torch.zeros(1, engine.model.config.vocab_size))
    assert logits[0, 0] == -torch.inf, "an answer cannot end inside a call"


def test_a_token_that_opens_a_call_and_goes_on_fits_the_call(folder: Path) -> None:
    """The token that ends the tag may hold what follows it, too."""
    inner = load_tokenizer(folder / "tiny").inner
    inner.add_tokens([">x", ">\n{", "_call>no", "! <tool_call>now", "x>y"])
    tokens = {text: inner.convert_tokens_to_ids(text) for text in (">x", ">\n{", "_call>no", "! <tool_call>now", "x>y")}
    bound = within(Grammars(Tokenizer(inner), len(inner)), CLOSED)

    def passes(written: str) -> set[str]:
        logits = bound(torch.tensor([inner.encode(written)]), torch.zeros(1, len(inner)))
        assert logits[0, inner.encode(">")[0]] == 0
        return {text for text, token in tokens.items() if logits[0, token] == 0}

    assert passes("Hm <tool_call") == {">\n{", "_call>no", "x>y"}
    assert passes("Hm <tool") == {">x", ">\n{", "x>y"}
    assert passes("Hm ") == {">x", ">\n{", "_call>no", "x>y"}


def test_a_tokenizer_that_ends_no_text_binds_none(folder: Path) -> None:
    inner = load_tokenizer(folder / "tiny").inner
    inner.eos_token = None
    with pytest.raises(APIError, match="no token that ends a text") as caught:
        Grammars(Tokenizer(inner), len(inner)).json_schema(CLOSED, b"")
    assert caught.value.status == 400
