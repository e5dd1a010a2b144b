"""Requests at the ends of every field, beside others whose answers must not change."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from benchmarks.hostile_requests import ABSURD, ROUTES, split_values
from tests.serve.conftest import Reached, local
from vivace.engine import Engine
from vivace.serve.config import ServeConfig


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
@example(("/v1/completions", {"prompt": [], "return_token_ids": True}))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_no_request_harms_another(beside: Bystanders, body: tuple[str, dict[str, Any]]) -> None:
    check(beside, *body)


@pytest.mark.slow
@given(asked())
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_harms_another_at_length(beside: Bystanders, body: tuple[str, dict[str, Any]]) -> None:
    check(beside, *body)
