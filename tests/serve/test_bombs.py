"""Requests made to take long: the event loop is on time all the while, and answers beside them are what they are."""

from __future__ import annotations

import http.client
import io
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.hostile_requests import BOMBS, TEXT, schema
from benchmarks.lateness import PROMISED_S, Lateness, health_lag
from tests.serve.conftest import Local, local
from tests.serve.lag import calmest
from vivace.checkpoint.tokenizer import Tokenizer
from vivace.engine import Engine
from vivace.serve import long_text
from vivace.serve.api_error import APIError
from vivace.serve.config import ServeConfig
from vivace.serve.encoding import encoded
from vivace.serve.lanes import Lane
from vivace.serve.long_text import LONG, decode_apart, encode_apart


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Local]:
    """A server of its own, on this process's loop probe."""
    with local(engine, ServeConfig(num_slots=8, max_queue=80)) as reached:
        warm = {"prompt": "a", "max_tokens": 1, "response_format": {"type": "json_object"}}
        assert reached.http().post("/v1/completions", json=warm).status_code == 200
        yield reached


def send(server: Local, path: str, body: bytes) -> int:
    """The status of a request that was written beforehand; nothing here keeps Python's lock while it waits."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    while reply.read(1 << 16):
        pass
    connection.close()
    return reply.status


@pytest.mark.parametrize("name", BOMBS)
def test_the_loop_is_on_time(server: Local, name: str) -> None:
    path, body, status = BOMBS[name]
    statuses = []

    def measure() -> Lateness:
        with server.lag() as lateness:
            begun = time.monotonic()
            statuses.append(send(server, path, body))
            time.sleep(max(0.5 - (time.monotonic() - begun), 0))
        return lateness

    lateness = calmest(measure)
    assert set(statuses) == {status}
    assert lateness.p99_s < PROMISED_S, f"{name}: {lateness}"


@contextmanager
def streaming(server: Local, found: list[list[int]]) -> Iterator[None]:
    """A client that reads streams until the block is over."""
    is_over = threading.Event()

    def read() -> None:
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True, "return_token_ids": True}
        with server.http() as http:
            while not is_over.is_set():
                with http.stream("POST", "/v1/completions", json={**body, "method": "plain"}) as reply:
                    if reply.status_code == 429:  # the queue is full of the others
                        time.sleep(0.05)
                        continue
                    lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
                found.append([token for line in lines for token in json.loads(line)["choices"][0].get("token_ids", [])])

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.slow  # its bound is a time, which other tests beside it on two cores take too
def test_health_is_on_time_and_streams_are_the_same_beside_all_of_them(server: Local, engine: Engine) -> None:
    found: list[list[int]] = []

    def measure() -> Lateness:
        with streaming(server, found), health_lag(server.url) as lateness:
            threads = [threading.Thread(target=send, args=(server, path, body)) for path, body, _ in BOMBS.values()]
            for thread in threads:
                thread.start()
                time.sleep(0.1)
            for thread in threads:
                thread.join()
        return lateness

    lateness = calmest(measure)
    wanted = engine.generate("abc", raw=True, max_new_tokens=200, ignore_eos=True, method="plain")[0].token_ids
    assert len(found) > 0
    assert all(tuple(ids) == wanted for ids in found)
    assert lateness.p99_s < PROMISED_S, lateness


def test_a_schema_is_compiled_once(server: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = server.server.asking.grammars
    trials: list[str] = []
    compile_one = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda *args: (trials.append(args[1]), compile_one(*args))[1])
    for _ in range(3):
        assert send(server, "/v1/completions", schema({"enum": ["once", "only"]})) == 200
    assert len(trials) == 1


def test_a_lane_refuses_what_it_cannot_keep() -> None:
    import asyncio

    async def ask() -> None:
        lane, gate = Lane("test", num_threads=1, max_open=2), threading.Event()
        waiting = [asyncio.create_task(lane.run(gate.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(APIError, match="2 requests wait") as caught:
            await lane.run(gate.wait)
        assert caught.value.status == 429
        gate.set()
        assert await asyncio.gather(*waiting) == [True, True]
        assert await lane.run(lambda: threading.current_thread().name) == "vivace-test_0"
        lane.close()

    asyncio.run(ask())


def test_a_process_finds_the_same_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own, which takes seconds to begin, and what it does, in this one."""
    tokenizer: Tokenizer = engine.tokenizer
    text = TEXT[: LONG // 8] + "é東 <|end|>"
    assert encode_apart(engine.folder, text, special=True) == tokenizer.encode(text, special=True)

    def here(command: list[str], *, input: bytes, **_: Any) -> Any:
        out = io.BytesIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", command[2:])
            patch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(input)))
            patch.setattr(sys, "stdout", SimpleNamespace(buffer=out))
            patch.setattr(os, "nice", lambda _: 0)
            long_text.main()
        return SimpleNamespace(stdout=out.getvalue())

    with monkeypatch.context() as patch:
        patch.setattr(long_text.subprocess, "run", here)
        for special in (True, False):
            tokens = encode_apart(engine.folder, text, special=special)
            assert tokens == tokenizer.encode(text, special=special)
        assert decode_apart(engine.folder, tokens) == tokenizer.decode(tokens)
    with pytest.raises(APIError, match="send it in parts") as caught:
        encode_apart(engine.folder / "nowhere", text, special=True)
    assert caught.value.status == 503


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "é\n\"</x>"], "b": {}, "c": [], "": {"x": [[], [{}]]}},
        {"ids": list(range(1000)), "deep": [{"top": [{"p": -0.25, "t": "x"}] * 300}] * 3},
        [{"n": place} for place in range(257)],
        "text",
        [],
    ],
)  # fmt: skip
def test_pieces_make_the_same_json(value: Any) -> None:
    assert encoded(value) == json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
