"""Requests at the ends of every field, beside others whose answers must not change."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.serve.conftest import Reached, local
from vivace.engine import Engine
from vivace.serve.bodies import ChatBody, CompletionBody, GenerationBody
from vivace.serve.config import ServeConfig

NUMBERS = (0, -0.0, 5e-324, 1e-300, 1e-40, 1e-8, 0.3, 1, 2, 7, 100, 1e8, 1e40, 1e300, 10**30, -1, -2)
ABSURD = (float("nan"), float("inf"), -float("inf"), 10**400, "1", "", [], {}, True)
COUNTS = (0, 1, 2, 3, 16, 17, 64, 2**31, 2**62, 2**63 - 1, 2**63, 10**30, -1)
SCHEMAS: tuple[Any, ...] = (
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"schema": {"enum": ["x"]}}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "object", "required": ["a"]}}},
    {"type": "json_schema", "json_schema": {"schema": {"not": {}}}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "^$"}}},
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SHARED: Mapping[str, tuple[Any, ...]] = {
    "model": ("vivace", "nobody", ""),
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "top_k": COUNTS,
    "min_p": NUMBERS,
    "repetition_penalty": NUMBERS,
    "presence_penalty": NUMBERS,
    "frequency_penalty": NUMBERS,
    "logit_bias": ({}, {"0": -100}, {"0": 100, "5": -100}, {str(i): -100.0 for i in range(300)}, {"5": 1e-320},
                   {"99999": 1}, {"-1": 1}, {"1": 1e9}, {"7": float("nan")}),
    "min_tokens": COUNTS,
    "ignore_eos": (True, False),
    "stop": ("a", ["\n", " "], "\u0000", "\U0001f600", ["x"] * 17, ""),
    "stop_token_ids": ([0], list(range(300))[:256], [10**9], [-1]),
    "n": (0, 1, 2, 16, 17),
    "seed": (0, 2**62, 2**63 - 1, 2**63, -(2**63), -1),
    "stream": (True, False),
    "stream_options": ({"include_usage": True}, {}),
    "response_format": SCHEMAS,
    "skip_special_tokens": (True, False),
    "return_token_ids": (True, False),
    "return_progress": (True, False),
    "return_trace": (True, False),
    "method": ("plain", "lookup", "multirate", "multirate+lookup", "auto", "draft", "layerskip", "lookahead", ""),
    "num_draft_tokens": COUNTS,
    "quality": NUMBERS,
    "priority": (-1000, 1000, 1001, 0),
    "cache_salt": ("a", "", "\u0000", "a" * 200, "a" * 201),
    "user": ("", "u" * 1000),
    "safety_identifier": ("s",),
}  # fmt: skip
CHAT: Mapping[str, tuple[Any, ...]] = {
    "messages": (
        [{"role": "user", "content": "a"}],
        [{"role": "", "content": "a"}],
        [{"role": "user", "content": "x " * 2000}],
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 3,
        [],
    ),
    "max_completion_tokens": COUNTS,
    "max_tokens": COUNTS,
    "logprobs": (True, False),
    "top_logprobs": COUNTS,
    "tools": ([], [TOOL], [TOOL, TOOL]),
    "tool_choice": ("auto", "none", "required", TOOL),
    "parallel_tool_calls": (True, False),
    "chat_template_kwargs": ({}, {"messages": []}, {"x": 1}),
    "continue_final_message": (True, False),
}
COMPLETION: Mapping[str, tuple[Any, ...]] = {
    "prompt": ("abc", "", "\u0000", [1], [], [[]], [[1, 2], [3]], ["a"] * 65, [10**9], "x " * 2000, ["", "a"]),
    "max_tokens": COUNTS,
    "logprobs": COUNTS,
    "echo": (True, False),
}
ROUTES: Mapping[str, tuple[type[GenerationBody], Mapping[str, tuple[Any, ...]], dict[str, Any]]] = {
    "/v1/chat/completions": (
        ChatBody,
        {**SHARED, **CHAT},
        {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 6},
    ),
    "/v1/completions": (CompletionBody, {**SHARED, **COMPLETION}, {"prompt": "abc", "max_tokens": 6}),
}


def fits(kind: type[GenerationBody], body: Mapping[str, Any]) -> bool:
    """Whether a body is one of this kind, before anything else is known."""
    try:
        kind.model_validate(body)
    except ValidationError:
        return False
    return True


@cache
def split_values(route: str) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Values of every field that are taken for themselves, and those that are not."""
    kind, fields, body = ROUTES[route]
    good = {name: [value for value in values if fits(kind, {**body, name: value})] for name, values in fields.items()}
    bad = {name: [value for value in values if value not in good[name]] for name, values in fields.items()}
    return {name: values for name, values in good.items() if values}, bad


@st.composite
def asked(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A route and a body for it: fields at their ends, and in one of five bodies a value that no field takes."""
    route = draw(st.sampled_from(sorted(ROUTES)))
    good, bad = split_values(route)
    names = draw(st.lists(st.sampled_from(sorted(good)), max_size=8, unique=True))
    body = {**ROUTES[route][2], **{name: draw(st.sampled_from(good[name])) for name in names}}
    if draw(st.integers(0, 4)) == 0:
        name = draw(st.sampled_from(sorted(bad)))
        body[name] = draw(st.sampled_from((*bad[name], *ABSURD)))
    return route, body


class Bystanders:
    """Requests whose answers are known: one greedy, one drawn."""

    def __init__(self, reached: Reached, engine: Engine, tokens: int) -> None:
        prompts = {"greedy": "Describe: name[Cotto]", "drawn": "food[English]"}
        drawing = {"greedy": {}, "drawn": {"temperature": 0.9, "top_p": 0.95, "seed": 5, "method": "lookup"}}
        self.bodies: dict[str, dict[str, Any]] = {}
        self.known: dict[str, list[int]] = {}
        for name, prompt in prompts.items():
            more: dict[str, Any] = drawing[name]
            self.bodies[name] = {
                "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True, **more
            }  # fmt: skip
            (result,) = engine.generate(prompt, raw=True, max_new_tokens=tokens, ignore_eos=True, **more)
            self.known[name] = list(result.token_ids)
        self.pool = ThreadPoolExecutor(len(prompts))
        self.http = reached.http()
        self.is_busy = threading.Event()

    def answered_beside(self, route: str, body: dict[str, Any]) -> httpx2.Response:
        """Send a body while the others are answered, and compare their answers with what is known."""
        sent = {name: self.pool.submit(self._ask, own) for name, own in self.bodies.items()}
        content = json.dumps(body).encode()
        found = self.http.post(route, content=content, headers={"Content-Type": "application/json"})
        for name, own in sent.items():
            reply = own.result()
            assert reply.status_code == 200, (name, reply.text, body)
            assert reply.json()["choices"][0]["token_ids"] == self.known[name], (name, body)
        return found

    def _ask(self, body: dict[str, Any]) -> httpx2.Response:
        return self.http.post("/v1/completions", json=body)


@pytest.fixture(scope="module")
def beside(engine: Engine) -> Iterator[Bystanders]:
    with local(engine, ServeConfig(port=0, num_slots=6)) as reached:
        yield Bystanders(reached, engine, 24)


def check(beside: Bystanders, route: str, body: dict[str, Any]) -> None:
    """What is asked is answered or refused, in one sentence, and is never the server's fault."""
    reply = beside.answered_beside(route, body)
    assert reply.status_code < 500, (reply.text, body)
    if reply.headers["content-type"].startswith("text/event-stream"):
        errors = [json.loads(line[6:]).get("error") for line in reply.text.splitlines() if line.startswith("data: {")]
        assert reply.text.endswith("data: [DONE]\n\n")
        found = [error for error in errors if error]
    else:
        found = [reply.json()["error"]] if reply.status_code != 200 else []
    for error in found:
        assert error["type"] != "server_error", (error, body)
        assert "\n" not in error["message"]


def test_every_field_is_taken_to_its_ends() -> None:
    for kind, fields, _ in ROUTES.values():
        assert set(fields) == set(kind.model_fields)


ENUM = {"type": "json_schema", "json_schema": {"schema": {"enum": ["x"]}}}
NOTHING_LEFT: tuple[dict[str, Any], ...] = (
    {"response_format": ENUM, "min_tokens": 10, "max_tokens": 20, "temperature": 1.0},
    {"response_format": ENUM, "min_tokens": 10, "max_tokens": 20},
    {"response_format": ENUM, "min_tokens": 10, "max_tokens": 20, "temperature": 1.0, "stream": True},
)


@given(asked())
@example(("/v1/completions", {"prompt": "abc", **NOTHING_LEFT[0]}))
@example(("/v1/completions", {"prompt": "abc", **NOTHING_LEFT[2]}))
@example(("/v1/completions", {"prompt": "abc", "temperature": 1e-40}))
@example(("/v1/completions", {"prompt": "abc", "repetition_penalty": 1e-300, "temperature": 1}))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_no_request_harms_another(beside: Bystanders, body: tuple[str, dict[str, Any]]) -> None:
    check(beside, *body)


@pytest.mark.slow
@given(asked())
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_harms_another_at_length(beside: Bystanders, body: tuple[str, dict[str, Any]]) -> None:
    check(beside, *body)
