"""How long an answer may be when the request does not say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.conftest import Reached, local
from vivace.engine import Engine
from vivace.errors import ConfigError
from vivace.serve.config import ServeConfig

ENDLESS = {"prompt": [5] * 20, "ignore_eos": True, "method": "plain"}


@pytest.fixture(scope="module")
def short(engine: Engine) -> Iterator[Reached]:
    """A server whose operator says how long answers are."""
    with local(engine, ServeConfig(default_max_tokens=7, max_model_len=64)) as reached:
        yield reached


def usage(reached: Reached, **more: object) -> dict[str, int]:
    reply = reached.http().post("/v1/completions", json={**ENDLESS, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()["usage"]


def test_an_answer_runs_to_the_end_of_the_context(server: Reached) -> None:
    assert usage(server)["completion_tokens"] == 1024 - 20
    assert usage(server, min_tokens=600)["completion_tokens"] == 1024 - 20
    chat = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True, "method": "plain"}
    assert server.http().post("/v1/chat/completions", json=chat).json()["usage"]["total_tokens"] == 1024


def test_the_operator_may_say_less(short: Reached) -> None:
    assert usage(short)["completion_tokens"] == 7
    assert usage(short, max_tokens=30)["completion_tokens"] == 30
    assert usage(short, prompt=[5] * 60)["completion_tokens"] == 4, "no more than there is room for"


@pytest.mark.parametrize(("says", "num_new"), [({"max_new_tokens": 5}, 5), ({"max_length": 30}, 10)])
def test_the_checkpoint_may_say_less(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, says: dict[str, int], num_new: int
) -> None:
    monkeypatch.setattr(engine, "defaults", {**engine.defaults, **says})
    with local(engine, ServeConfig(max_model_len=64)) as reached:
        assert usage(reached)["completion_tokens"] == num_new


def test_a_default_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="default_max_tokens"):
        ServeConfig(default_max_tokens=0)
