"""Two keys share a server and nothing else: what one sent can neither harm the other nor be found out by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.conftest import Reached, local
from vivace.engine import Engine
from vivace.serve.config import ServeConfig

PROMPT = [40 + place % 50 for place in range(300)]


@pytest.fixture(scope="module")
def shared(engine: Engine) -> Iterator[Reached]:
    """A server with two keys."""
    with local(engine, ServeConfig(api_keys=("first", "second"))) as reached:
        yield reached


def ask(server: Reached, key: str, prompt: list[int], **fields: Any) -> Any:
    """The reply to a completion under a key."""
    with server.http() as http:
        http.headers["Authorization"] = f"Bearer {key}"
        return http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, "ignore_eos": True, **fields})


def cached(reply: Any) -> int:
    """Prompt tokens that the server says it knew."""
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("salt", [{}, {"cache_salt": "both use it"}])
def test_two_keys_cannot_see_each_others_prompts(shared: Reached, salt: dict[str, str]) -> None:
    replies = [ask(shared, key, PROMPT, **salt) for key in ("first", "first", "second", "second", "first")]
    assert [cached(reply) for reply in replies] == [0, 299, 0, 299, 299]
    assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1


def test_a_crafted_salt_poisons_nobody(shared: Reached) -> None:
    """Once the salt, a zero byte and the tokens were joined without their lengths: the victim was answered 500."""
    crafted = {"cache_salt": b"\0(\0\0\0\0\0\0".decode()}
    assert ask(shared, "first", [41, 42, 43], **crafted).status_code == 200
    victim = ask(shared, "first", [40, 41, 42, 43])
    alone = ask(shared, "first", [40, 41, 42, 43], cache_salt="of its own")
    assert (victim.status_code, alone.status_code, cached(alone)) == (200, 200, 0)
    assert victim.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]
