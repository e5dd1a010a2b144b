"""Clients send every field at its default: what asks for nothing is accepted, and changes nothing."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from pydantic import ValidationError

from tests.serve.conftest import Running
from vivace.serve.bodies import ChatBody, CompletionBody
from vivace.serve.foreign import NEUTRAL, REFUSED

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
TEXT: dict[str, Any] = {"prompt": "abc"}
ASK_NOTHING: list[tuple[str, Any]] = [
    ("store", False),
    ("metadata", {}),
    ("service_tier", "auto"),
    ("service_tier", "default"),
    ("modalities", ["text"]),
    ("verbosity", "medium"),
    ("best_of", 1),
    ("suffix", ""),
    ("functions", []),
    ("function_call", "none"),
    ("function_call", "auto"),
    ("prediction", {"type": "content", "content": ""}),
    ("prompt_cache_key", "session-7"),
    ("prompt_cache_options", {}),
    ("prompt_cache_options", {"mode": "implicit"}),
    ("prompt_cache_retention", "in_memory"),
    ("stop", ""),
    ("stop", [""]),
    ("stop", []),
    ("seed", -1),
    ("max_tokens", -1),
    ("max_completion_tokens", -1),
    ("stream_options", {}),
    ("stream_options", {"include_usage": False}),
    ("stream_options", {"include_obfuscation": False}),
    ("tools", []),
    ("tool_choice", "none"),
    ("tool_choice", "auto"),
    ("parallel_tool_calls", True),
    ("response_format", {"type": "text"}),
    ("logit_bias", {}),
    ("logprobs", None),
    ("top_logprobs", 0),
    ("add_generation_prompt", True),
    ("length_penalty", 1.0),
    ("typical_p", 1),
    ("use_beam_search", False),
    ("include_stop_str_in_output", False),
    ("logits_processors", []),
]
ASK_SOMETHING: list[tuple[str, Any]] = [
    ("store", True),
    ("metadata", {"run": "7"}),
    ("service_tier", "flex"),
    ("modalities", ["text", "audio"]),
    ("verbosity", "low"),
    ("best_of", 2),
    ("best_of", True),
    ("suffix", "end"),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("prediction", {"type": "content", "content": "a"}),
    ("prompt_cache_key", 7),
    ("prompt_cache_options", {"mode": "explicit"}),
    ("prompt_cache_retention", "24h"),
    ("stream_options", {"include_obfuscation": True}),
    ("tool_choice", "required"),
    ("parallel_tool_calls", False),
    ("add_generation_prompt", False),
    ("length_penalty", 2.0),
    ("max_tokens", -2),
    ("seed", 2**63),
    ("web_search_options", {}),
    ("moderation", {"model": "m"}),
    ("reasoning_effort", "none"),
]
CHAT_ONLY = {"tools", "tool_choice", "parallel_tool_calls", "top_logprobs", "max_completion_tokens"}


@pytest.mark.parametrize(("name", "value"), ASK_NOTHING)
def test_what_asks_for_nothing_is_as_if_left_out(name: str, value: Any) -> None:
    def meaning(body: ChatBody | CompletionBody) -> dict[str, Any]:
        return {**body.model_dump(), "stops": body.stops, "options": body.options} | {"stop": 0, "stream_options": 0}

    assert meaning(ChatBody.model_validate({**CHAT, name: value})) == meaning(ChatBody.model_validate(CHAT))
    if name not in CHAT_ONLY:
        body = CompletionBody.model_validate({**TEXT, name: value})
        assert meaning(body) == meaning(CompletionBody.model_validate(TEXT))


@pytest.mark.parametrize(("name", "value"), ASK_SOMETHING)
def test_what_asks_for_something_that_is_not_done_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        ChatBody.model_validate({**CHAT, name: value})


def test_values_that_depend_on_other_fields() -> None:
    assert ChatBody.model_validate({**CHAT, "n": 3, "best_of": 3}).n == 3
    body = {**CHAT, "continue_final_message": True, "add_generation_prompt": False}
    assert ChatBody.model_validate(body).continue_final_message
    with pytest.raises(ValidationError):
        ChatBody.model_validate({**body, "add_generation_prompt": True})
    assert ChatBody.model_validate({**CHAT, "stop": ["", "x"]}).stops == ("x",)


def test_every_neutral_value_is_tried() -> None:
    tried = {name for name, _ in ASK_NOTHING}
    assert set(NEUTRAL) <= tried


def test_every_field_of_openais_client_is_decided() -> None:
    """Read from the client itself, so that a newer one that knows more fails here."""
    known = {
        *chats.CompletionCreateParamsBase.__annotations__,
        *chats.CompletionCreateParamsStreaming.__annotations__,
        *completions.CompletionCreateParamsBase.__annotations__,
        *completions.CompletionCreateParamsStreaming.__annotations__,
    }
    assert len(known) > 40
    assert known - {*ChatBody.model_fields, *CompletionBody.model_fields, *REFUSED} == set()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_all_defaults_at_once_are_answered(http: httpx2.Client, path: str) -> None:
    """As a client does that fills in everything."""
    base = {**(CHAT if "chat" in path else TEXT), "max_tokens": 4}
    skipped = {"max_tokens", "max_completion_tokens", *(() if "chat" in path else CHAT_ONLY)}
    everything = {name: value for name, value in ASK_NOTHING if name not in skipped}
    wanted, found = (http.post(path, json=body) for body in (base, {**base, **everything}))
    assert found.status_code == 200, found.text
    assert found.json()["choices"] == wanted.json()["choices"]


@pytest.mark.parametrize("seed", [-(2**63), -2, 2**62, 2**63 - 1])
def test_every_seed_of_64_bits_draws_the_same_twice(http: httpx2.Client, seed: int) -> None:
    body = {"prompt": "abc", "max_tokens": 8, "temperature": 1.5, "n": 2, "seed": seed, "return_token_ids": True}
    first, second = (http.post("/v1/completions", json=body).json()["choices"] for _ in range(2))
    assert [one["token_ids"] for one in first] == [one["token_ids"] for one in second]


def test_the_safety_identifier_is_logged(server: Running) -> None:
    with server.http() as http:
        body = {**CHAT, "max_tokens": 1, "safety_identifier": "somebody-18"}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert "somebody-18" in server.log.read_text()
