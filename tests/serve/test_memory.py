"""A server under a limit of memory: what fits together runs together, the rest waits or is told to come back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
import pytest

import vivace
from tests.decode.failing import outcomes
from tests.every_method import make_model
from tests.serve.conftest import Local, local
from vivace.decode.memory import MemoryBudget, text_bytes
from vivace.decode.plain import NoDrafts
from vivace.engine import Engine, Options
from vivace.errors import MemoryLimitError
from vivace.serve.app import Server
from vivace.serve.config import ServeConfig

LONGEST = 24
PLAIN = ServeConfig(method="plain", max_model_len=LONGEST, prefix_cache_bytes=0)
CLIENTS = 16


def limited(folder: Path, texts: float, num_tokens: int = LONGEST) -> Engine:
    """Room for so many texts of this length."""
    free = vivace.load(folder / "tiny")
    text = text_bytes(free.model, NoDrafts(), num_tokens)
    return vivace.load(folder / "tiny", memory=free.memory.held_bytes + int(texts * text))


@pytest.fixture
def three(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    """A server with room for three of its longest texts, that never promises more than it has."""
    take = MemoryBudget.take

    def checked(self: MemoryBudget, num_bytes: int) -> None:
        take(self, num_bytes)
        assert self.limit_bytes is None or self.taken_bytes <= (self.room_bytes or 0)

    monkeypatch.setattr(MemoryBudget, "take", checked)
    with local(limited(folder, 3.5), PLAIN) as server:
        yield server


def ask(server: Local, number: int, **more: Any) -> httpx2.Response:
    prompt = [5 + number % 40, 9, 30]
    body = {"prompt": prompt, "max_tokens": LONGEST - 3, "ignore_eos": True, "return_token_ids": True, **more}
    return server.http().post("/v1/completions", json=body)


def test_clients_beyond_the_memory_wait_for_their_turn(three: Local, engine: Engine) -> None:
    running, step = [], three.server.worker.session.step

    def watched() -> Any:
        emitted = step()
        running.append(len(three.server.worker.session.reading))
        return emitted

    three.server.worker.session.step = watched  # type: ignore[method-assign]
    with ThreadPoolExecutor(CLIENTS) as pool:
        replies = list(pool.map(lambda number: ask(three, number), range(CLIENTS)))
    limit = three.metric("vivace_kv_bytes_limit")
    assert [reply.status_code for reply in replies] == [200] * CLIENTS
    assert max(running) == 3
    assert 3 <= limit / text_bytes(engine.model, NoDrafts(), LONGEST) < 4
    for number, reply in enumerate(replies):
        asked = engine.request_for([5 + number % 40, 9, 30], Options(max_new_tokens=LONGEST - 3, ignore_eos=True))
        [wanted] = outcomes(engine.session([asked], Options()), [replace(asked, drafter=NoDrafts())])
        assert reply.json()["choices"][0]["token_ids"] == wanted.tokens
    three.wait_idle()
    assert three.metric("vivace_kv_bytes") == 0


def test_texts_that_outgrow_the_memory_give_way_and_say_the_same(folder: Path, engine: Engine) -> None:
    """More begin than can end together: the youngest are preempted and read again."""
    config, count = replace(PLAIN, max_model_len=256), 6
    with local(limited(folder, 2.2, 256), config) as server, ThreadPoolExecutor(count) as pool:
        replies = list(pool.map(lambda number: ask(server, number, max_tokens=253), range(count)))
        server.wait_idle()
        assert server.metric("vivace_preemptions_total") > 0
        assert server.metric("vivace_kv_bytes") == 0
    assert [reply.status_code for reply in replies] == [200] * count
    for number, reply in enumerate(replies):
        asked = engine.request_for([5 + number % 40, 9, 30], Options(max_new_tokens=253, ignore_eos=True))
        [wanted] = outcomes(engine.session([asked], Options()), [replace(asked, drafter=NoDrafts())])
        assert reply.json()["choices"][0]["token_ids"] == wanted.tokens


def test_a_text_may_be_as_long_as_there_is_memory_for(folder: Path) -> None:
    with local(limited(folder, 1.2), ServeConfig(method="plain", prefix_cache_bytes=0)) as server:
        longest = server.server.max_model_len
        assert LONGEST <= longest < 1024
        reply = ask(server, 1, max_tokens=None)
        assert (reply.status_code, reply.json()["usage"]["total_tokens"]) == (200, longest)
        refused = ask(server, 1, max_tokens=longest)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_what_can_never_fit_is_refused_at_once(tmp_path: Path) -> None:
    """A method whose own cache and weights are too much beside one longest text; those without are answered."""
    free = vivace.load(make_model(tmp_path, "draft"))
    text = text_bytes(free.model, NoDrafts(), LONGEST)
    for room, part in ((text, "the draft model"), (text + free.memory.held_bytes + 4096, "of keys and values")):
        engine = vivace.load(free.folder, memory=free.memory.held_bytes + room)
        with local(engine, PLAIN) as server:
            refused = ask(server, 1, method="draft")
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_large_for_memory")
            assert part in refused.json()["error"]["message"]
            assert ask(server, 1).status_code == 200


def test_what_cannot_wait_is_told_to_come_back(folder: Path) -> None:
    with local(limited(folder, 1.2), replace(PLAIN, max_queue=0)) as server, ThreadPoolExecutor(1) as pool:
        gate, worker = Event(), server.server.worker
        step = worker.session.step
        worker.session.step = lambda: (step(), gate.wait())[0]  # type: ignore[method-assign]
        first = pool.submit(ask, server, 1)
        server.wait_until(lambda: worker.memory.taken_bytes > 0)
        refused = ask(server, 2)
        gate.set()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "memory_exceeded")
        assert refused.headers["Retry-After"] == "1"
        assert first.result().status_code == 200
        assert ask(server, 2).status_code == 200


def test_a_server_whose_longest_text_cannot_fit_does_not_start(folder: Path) -> None:
    with pytest.raises(MemoryLimitError, match=r"a text of 24 tokens takes .*--max-model-len"):
        Server(limited(folder, 0.5), PLAIN)
