"""What is not let in, and what errors look like."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.serve.conftest import Reached, local
from vivace.cli.app import run
from vivace.engine import Engine
from vivace.errors import ConfigError
from vivace.serve.config import ServeConfig
from vivace.serve.foreign import REFUSED

TOOL = {"type": "function", "function": {"name": "f"}}
ODD = {"type": "function", "function": {"name": "f", "parameters": {"type": "odd"}}}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def locked(engine: Engine) -> Iterator[Reached]:
    """A server with keys and little room."""
    config = ServeConfig(port=0, api_keys=("first", "second"), max_body_bytes=2000, max_model_len=64)
    with local(engine, config) as reached:
        yield reached


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/openapi.json", "/nowhere"])
def test_a_key_is_needed(locked: Reached, path: str) -> None:
    with locked.http() as http:
        for headers in ({}, {"Authorization": "Bearer firs"}, {"Authorization": "Basic first"}, {"X-Api-Key": "first"}):
            reply = http.get(path, headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        for key in ("first", "second"):
            assert http.get(path, headers={"Authorization": f"Bearer {key}"}).status_code in (200, 404)


def test_the_page_and_health_need_no_key(locked: Reached) -> None:
    with locked.http() as http:
        assert http.get("/").status_code == http.get("/health").status_code == 200


def test_limits(locked: Reached) -> None:
    with locked.http() as http:
        http.headers["Authorization"] = "Bearer first"
        large = {**CHAT, "messages": [{"role": "user", "content": "a" * 2000}]}
        assert http.post("/v1/chat/completions", json=large).status_code == 413

        def pieces() -> Iterator[bytes]:
            yield from (b"x" * 500 for _ in range(10))

        reply = http.post("/v1/completions", content=pieces(), headers={"Content-Type": "application/json"})
        assert reply.status_code == 413
        reply = http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 64})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        reply = http.post("/v1/completions", json={"prompt": [5] * 64})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        reply = http.post("/v1/completions", json={"prompt": [5] * 60, "ignore_eos": True})
        assert reply.json()["usage"]["total_tokens"] == 64, "an answer without a limit ends where the slot does"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (b"{", None, "not JSON"),
        (b"[]", None, "body"),
        (b"\xff\xfe", None, ""),
        ({}, "messages", "missing"),
        ({**CHAT, "temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({**CHAT, "prompt": "a"}, "prompt", "belongs to another route"),
        ({**CHAT, "temperature": "hot"}, "temperature", "number"),
        ({**CHAT, "temperature": -1}, "temperature", "found -1"),
        ({**CHAT, "top_p": 0}, "top_p", "greater than 0"),
        ({**CHAT, "n": 17}, "n", "16"),
        ({**CHAT, "n": True}, "n", "integer"),
        ({**CHAT, "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({**CHAT, "logit_bias": {"99999": 1}}, "logit_bias", "99999"),
        ({**CHAT, "stop_token_ids": [99999]}, "stop_token_ids", "99999"),
        ({**CHAT, "stop": [7]}, "stop", ""),
        ({**CHAT, "stop": ["a"] * 17}, "stop", "at most 16"),
        ({**CHAT, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({**CHAT, "stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
        ({**CHAT, "return_progress": True}, "return_progress", "only with stream"),
        ({**CHAT, "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({**CHAT, "parallel_tool_calls": False}, "parallel_tool_calls", "needs tools"),
        ({**CHAT, "tools": [TOOL, TOOL]}, "tools", "one name"),
        ({**CHAT, "tools": [{**TOOL, "extra": 1}]}, "tools.0.extra", "not supported"),
        ({**CHAT, "tools": [TOOL], "tool_choice": "any"}, "tool_choice", "required"),
        ({**CHAT, "tools": [TOOL], "tool_choice": {**TOOL, "function": {"name": "g"}}}, "tool_choice", "'g'"),
        ({**CHAT, "tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
         "response_format", "exclude"),
        ({**CHAT, "tools": [ODD], "tool_choice": "required"}, "tools", "schema"),
        ({**CHAT, "chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs", "does not read 'thinking'"),
        ({**CHAT, "chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs",
         "use the field 'continue_final_message'"),
        ({**CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "use the field 'messages'"),
        ({**CHAT, "chat_template_kwargs": {"tools": [TOOL]}}, "chat_template_kwargs", "use the field 'tools'"),
        ({**CHAT, "response_format": {"type": "json_schema"}}, "response_format", "needs the field json_schema"),
        ({**CHAT, "response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format",
         "only with type 'json_schema'"),
        ({**CHAT, "num_draft_tokens": 3}, "num_draft_tokens", "finds out how far to draft"),
        ({**CHAT, "min_tokens": 9}, "min_tokens", "more than max_tokens, 2"),
        ({**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", ""),
        ({**CHAT, "messages": [{"role": "user", "content": "\ud800"}]}, None, "Unicode"),
        ({**CHAT, "messages": [{"role": "user", "contnet": "a"}]}, "messages.0.contnet", "did you mean 'content'"),
        ({**CHAT, "messages": [{"role": "user", "content": "a", "name": "Ann"}]}, "messages.0.name",
         "does not read 'name'; leave it out"),
        ({**CHAT, "messages": [{"role": "user", "content": "a", "weight": 0}]}, "messages.0.weight", "leave it out"),
        ({**CHAT, "messages": [{"role": "untrusted", "content": "a", "tool_calls": [{}]}]}, "messages.0.tool_calls",
         "only content"),
        ({**CHAT, "cache_salt": "\ud800"}, None, "Unicode"),
    ],
)  # fmt: skip
def test_a_bad_body_is_one_sentence(http: httpx2.Client, body: Any, param: str | None, says: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = http.post("/v1/chat/completions", content=content, headers={"Content-Type": "application/json"})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["param"] or "").startswith(param or "")
    assert says in error["message"]
    assert "\n" not in error["message"]
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": []}, "prompt is an empty list"),
        ({"prompt": ["a"] * 65}, "prompt: list should have at most 64 items"),
        ({"prompt": [[1]] * 65}, "prompt: list should have at most 64 items"),
        ({"prompt": [1, "a"]}, "prompt.1: input should be a valid integer, found 'a'"),
        ({"prompt": [[1], ["a"]]}, "prompt.1.0: input should be a valid integer, found 'a'"),
        ({"prompt": "a", "stop": ["b", 7]}, "stop.1: input should be a valid string, found 7"),
        ({"prompt": "a", "max_tokens": 0}, "nothing to answer"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"return_token_ids": True}])
def test_a_bad_completion_is_one_sentence(
    http: httpx2.Client, body: dict[str, Any], says: str, more: dict[str, Any]
) -> None:
    reply = http.post("/v1/completions", json={**body, **more})
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_fields_of_others_are_refused_by_name(http: httpx2.Client, name: str) -> None:
    reply = http.post("/v1/chat/completions", json={**CHAT, name: {"odd": 1}})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == name
    assert REFUSED[name] in reply.json()["error"]["message"]


def test_null_is_the_same_as_nothing(http: httpx2.Client) -> None:
    nothing = dict.fromkeys(("temperature", "stop", "tools", "suffix", "logit_bias", "n", "stream", "seed"))
    assert http.post("/v1/chat/completions", json={**CHAT, **nothing}).status_code == 200


def test_other_sites_are_kept_out(http: httpx2.Client) -> None:
    assert http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    reply = http.post("/v1/chat/completions", content=json.dumps(CHAT), headers={"Content-Type": "text/plain"})
    assert reply.status_code == 415
    upper = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert http.post("/v1/chat/completions", content=json.dumps(CHAT), headers=upper).status_code == 200
    reply = http.options(
        "/v1/models", headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "GET"}
    )
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_unknown_routes_have_the_same_shape(http: httpx2.Client) -> None:
    for reply, status in ((http.get("/v1/nothing"), 404), (http.get("/v1/completions"), 405)):
        assert (reply.status_code, set(reply.json()["error"])) == (status, {"message", "type", "param", "code"})


def test_an_open_server_must_be_meant() -> None:
    with pytest.raises(ConfigError, match="--allow-no-key"):
        ServeConfig(host="0.0.0.0")
    assert not ServeConfig(host="0.0.0.0", allow_no_key=True).is_local
    assert ServeConfig(host="0.0.0.0", api_keys=("x",)).api_keys


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--host", "0.0.0.0"), "--allow-no-key"),
        (("--metrics-compat", "sglang"), "must be vllm"),
        (("--adapter", "tiny=x"), "two models are called 'tiny'"),
        (("--adapter", "other=nowhere"), "nowhere"),
        (("--method", "mod"), "vivace train"),
        (("--method", "multirate"), "vivace train"),
        (("--max-model-len", "4096"), "holds 1024"),
    ],
)
def test_a_server_that_cannot_start_says_why(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert run(["serve", "--model", str(folder / "tiny"), "--port", "0", "--quiet", *words]) in (1, 2)
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
