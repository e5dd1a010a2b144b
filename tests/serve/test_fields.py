"""Every field of a request does something: a field without a case here, or whose case shows nothing, fails."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.serve.conftest import Running
from vivace.serve.bodies import ChatBody, CompletionBody, GenerationBody
from vivace.serve.foreign import REFUSED

CHAT = {"messages": [{"role": "user", "content": "Describe: name[Cotto]"}], "max_tokens": 12}
DRAWN = {"temperature": 1.0, "seed": 7, "max_tokens": 24}
TOOL = {"type": "function", "function": {"name": "look"}}

FORCED = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 150}

Case = tuple[dict[str, Any], dict[str, Any]]
SHARED: dict[str, Case] = {
    "model": ({"model": "tiny"}, {"model": "alpha"}),
    "temperature": ({"temperature": 0}, {"temperature": 2.0, "seed": 1}),
    "top_p": (DRAWN, {**DRAWN, "top_p": 0.1}),
    "top_k": (DRAWN, {**DRAWN, "top_k": 1}),
    "min_p": (DRAWN, {**DRAWN, "min_p": 0.9}),
    "repetition_penalty": ({}, {"repetition_penalty": 5.0, "max_tokens": 12}),
    "presence_penalty": ({"max_tokens": 40}, {"max_tokens": 40, "presence_penalty": 2.0}),
    "frequency_penalty": ({"max_tokens": 40}, {"max_tokens": 40, "frequency_penalty": 2.0}),
    "logit_bias": ({}, {"logit_bias": {"40": 100}}),
    "min_tokens": ({"logit_bias": {"0": 100}}, {"logit_bias": {"0": 100}, "min_tokens": 3}),
    "ignore_eos": ({"logit_bias": {"0": 100}}, {"logit_bias": {"0": 100}, "ignore_eos": True}),
    "stop": ({"logit_bias": {"40": 100}}, {"logit_bias": {"40": 100}, "stop": "BOUND"}),
    "stop_token_ids": ({"logit_bias": {"40": 100}}, {"logit_bias": {"40": 100}, "stop_token_ids": [40]}),
    "n": ({}, {"n": 2}),
    "seed": (DRAWN, {**DRAWN, "seed": 8}),
    "stream": ({}, {"stream": True}),
    "stream_options": ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
    "response_format": ({}, {"response_format": {"type": "json_object"}}),
    "skip_special_tokens": (
        {"logit_bias": {"1": 100}},
        {"logit_bias": {"1": 100}, "skip_special_tokens": False},
    ),
    "return_token_ids": ({}, {"return_token_ids": True}),
    "return_progress": ({"stream": True}, {"stream": True, "return_progress": True}),
    "return_trace": ({}, {"return_trace": True}),
    "method": ({"method": "plain"}, {"method": "lookup"}),
    "quality": (
        {"model": "early", "method": "dynamic", "max_tokens": 30, "return_trace": True},
        {"model": "early", "method": "dynamic", "max_tokens": 30, "return_trace": True, "quality": 0.9},
    ),
    "prefill": ({}, {"prefill": "random", "min_prompt": 2, "keep": "0:0.1"}),
    "keep": ({"prefill": "random", "min_prompt": 2}, {"prefill": "random", "min_prompt": 2, "keep": "0:0.2"}),
    "min_prompt": ({"prefill": "random"}, {"prefill": "random", "min_prompt": 2}),
    "decode_keep": (
        {"prefill": "lazy", "min_prompt": 2, "keep": "1:0.3"},
        {"prefill": "lazy", "min_prompt": 2, "keep": "1:0.3", "decode_keep": 0.3},
    ),
    "num_draft_tokens": (
        {"model": "alpha", "method": "multirate", "max_tokens": 30},
        {"model": "alpha", "method": "multirate", "max_tokens": 30, "num_draft_tokens": 9},
    ),
}
CHATS: dict[str, Case] = {
    "messages": ({}, {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]}),
    "max_completion_tokens": ({}, {"max_tokens": None, "max_completion_tokens": 5}),
    "max_tokens": ({}, {"max_tokens": 5}),
    "logprobs": ({}, {"logprobs": True}),
    "top_logprobs": ({"logprobs": True}, {"logprobs": True, "top_logprobs": 2}),
    "tools": ({}, {"tools": [TOOL]}),
    "tool_choice": ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "required"}),
    "parallel_tool_calls": (FORCED, {**FORCED, "parallel_tool_calls": False}),
    "chat_template_kwargs": ({}, {"chat_template_kwargs": {"thinking": True}}),
    "continue_final_message": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
         "continue_final_message": True},
    ),
}  # fmt: skip
COMPLETIONS: dict[str, Case] = {
    "prompt": ({}, {"prompt": "another"}),
    "max_tokens": ({}, {"max_tokens": 5}),
    "logprobs": ({}, {"logprobs": 2}),
    "echo": ({}, {"echo": True}),
}
BEAMS = {"use_beam_search", "best_of", "length_penalty", "early_stopping"}
"""Fields of beam search, which completions take and chats refuse; what each does is in ``test_beams``."""
ELSEWHERE = {
    "priority": "test_lifetime: it leaves the queue first",
    "cache_salt": "test_sameness: entries are not shared",
    "user": "test_the_user_is_logged",
    "safety_identifier": "test_foreign: it is logged",
}


def test_every_field_has_a_case() -> None:
    shared = set(GenerationBody.model_fields)
    assert set(SHARED) | set(ELSEWHERE) == shared
    assert set(CHATS) == set(ChatBody.model_fields) - shared
    assert set(COMPLETIONS) | BEAMS == set(CompletionBody.model_fields) - shared


LOCAL_SERVERS = """top_k min_p repetition_penalty min_tokens ignore_eos stop_token_ids skip_special_tokens
continue_final_message chat_template_kwargs return_token_ids priority cache_salt return_progress draft_model
num_draft_tokens"""


def test_every_field_that_local_servers_know_is_decided() -> None:
    """Those of OpenAI's client are in ``test_foreign``."""
    decided = {*ChatBody.model_fields, *CompletionBody.model_fields, *REFUSED}
    assert not {*LOCAL_SERVERS.split()} - decided
    assert not {*REFUSED} & {*ChatBody.model_fields}
    assert {*REFUSED} & {*CompletionBody.model_fields} == BEAMS


def outcome(http: httpx2.Client, path: str, body: dict[str, Any]) -> Any:
    """What a request gives, without what differs between any two requests."""
    reply = http.post(path, json=body)
    if reply.status_code != 200:
        return reply.json()["error"]["param"]
    texts = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    found = [json.loads(text) for text in texts or [reply.text]]
    for part in found:
        for name in ("id", "created"):
            part.pop(name)
        for call in [
            call for choice in part["choices"] for call in (choice.get("message") or {}).get("tool_calls", [])
        ]:
            call.pop("id")
        part["metrics"] = {"method": part["metrics"]["method"]} if "metrics" in part else None
        (part.get("prompt_progress") or {}).pop("time_ms", None)
        if part.get("usage"):
            part["usage"].pop("prompt_tokens_details")
    return found


def check(http: httpx2.Client, path: str, base: dict[str, Any], case: Case) -> None:
    """The field changes the outcome, and nothing else does."""
    without, with_it = ({**base, "method": "plain", **changes} for changes in case)
    plain = outcome(http, path, without)
    assert plain == outcome(http, path, without), "the case shows what else changes, not the field"
    assert plain != outcome(http, path, with_it)


def bound(http: httpx2.Client, case: Case, base: dict[str, Any], path: str) -> Case:
    """A case whose stop text is what the biased token spells."""
    text = http.post("/detokenize", json={"tokens": [40, 40]}).json()["prompt"]
    return tuple({**part, **({"stop": text} if "stop" in part else {})} for part in case)  # type: ignore[return-value]


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_shared_fields(http: httpx2.Client, path: str, name: str) -> None:
    base = CHAT if "chat" in path else {"prompt": "abc", "max_tokens": 12}
    check(http, path, base, bound(http, SHARED[name], base, path))


@pytest.mark.parametrize("name", CHATS)
def test_chat_fields(http: httpx2.Client, name: str) -> None:
    check(http, "/v1/chat/completions", CHAT, CHATS[name])


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completion_fields(http: httpx2.Client, name: str) -> None:
    check(http, "/v1/completions", {"prompt": "abc", "max_tokens": 12}, COMPLETIONS[name])


def test_bias_is_what_is_written(http: httpx2.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 3, "logit_bias": {"40": 100}, "return_token_ids": True}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"] == [40] * 3


@pytest.mark.parametrize("method", ["plain", "lookup", "multirate"])
def test_penalties_reach_into_drafts(http: httpx2.Client, method: str) -> None:
    body = {"model": "alpha", "prompt": "abc abc abc", "max_tokens": 40, "presence_penalty": 2, "frequency_penalty": 1}
    settings = {**body, "return_token_ids": True, "ignore_eos": True}
    wanted = http.post("/v1/completions", json={**settings, "method": "plain"}).json()["choices"][0]["token_ids"]
    assert http.post("/v1/completions", json={**settings, "method": method}).json()["choices"][0]["token_ids"] == wanted


def test_the_user_is_logged(server: Running) -> None:
    with server.http() as http:
        assert http.post("/v1/chat/completions", json={**CHAT, "user": "somebody-17"}).status_code == 200
    assert "somebody-17" in server.log.read_text()
