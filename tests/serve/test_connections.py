"""Connections that only stand there: every wait for a client ends, and nobody is locked out by those who wait."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import httpx2
import pytest

from benchmarks.lateness import PROMISED_S
from tests.serve.conftest import Local, local
from vivace.engine import Engine
from vivace.errors import ConfigError
from vivace.serve.config import ServeConfig
from vivace.serve.connections import Connection

HEAD_S, BODY_S, IDLE_S, READ_S = 0.5, 0.7, 1.0, 1.0
PLACES = 6
LONG = {"prompt": "abc", "max_tokens": 900, "ignore_eos": True, "method": "plain"}


@pytest.fixture(scope="module")
def hasty(engine: Engine) -> Iterator[Local]:
    """A server that waits for nobody, with few connections."""
    config = ServeConfig(
        max_connections=PLACES,
        head_timeout_s=HEAD_S,
        body_timeout_s=BODY_S,
        idle_timeout_s=IDLE_S,
        read_timeout_s=READ_S,
        num_slots=2,
    )
    with local(engine, config) as reached:
        yield reached


@pytest.fixture(scope="module")
def crowded(engine: Engine) -> Iterator[Local]:
    """A server with few connections, whose patience no slow machine exhausts."""
    with local(engine, ServeConfig(max_connections=PLACES, num_slots=2)) as reached:
        yield reached


@pytest.fixture(autouse=True)
def nothing_is_left(hasty: Local, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No connection outlives its test, and nothing that clients do is an error of the server."""
    with caplog.at_level(logging.WARNING):
        yield
    hasty.wait_until(lambda: not hasty.server.connections.open, 10)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def connect(reached: Local) -> socket.socket:
    url = httpx2.URL(reached.url)
    return socket.create_connection((url.host, url.port), timeout=20)


def head(host: str = "localhost", **fields: object) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", f"Host: {host}", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "\r\n"]).encode()


def ask_health(connection: socket.socket) -> None:
    """A whole request and its whole answer, the connection stays open."""
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    found = b""
    while not found.endswith(b"}"):
        found += connection.recv(65536)
    assert found.startswith(b"HTTP/1.1 200")


def until_closed(connection: socket.socket) -> tuple[bytes, float]:
    """All that still comes, and how long it took until the server closed."""
    began, found = time.monotonic(), b""
    try:
        while data := connection.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found, time.monotonic() - began


def cut(reached: Local, reason: str) -> int:
    return reached.server.connections.cut[reason]


def test_a_connection_that_says_nothing_ends(hasty: Local) -> None:
    before = cut(hasty, "head_timeout")
    with connect(hasty) as connection:
        found, seconds = until_closed(connection)
    assert found == b""
    assert HEAD_S * 0.9 < seconds < HEAD_S + 1
    assert cut(hasty, "head_timeout") == before + 1


def test_a_head_that_comes_a_byte_at_a_time_ends(hasty: Local) -> None:
    with connect(hasty) as connection:
        began = time.monotonic()
        for byte in head(Content_Length=2) * 10:
            if time.monotonic() - began > HEAD_S - 0.2:
                break
            connection.sendall(bytes([byte]))
            time.sleep(0.05)
        found, _ = until_closed(connection)
    assert found.startswith(b"HTTP/1.1 408 ")
    assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"


def test_a_second_head_is_waited_for_no_longer(hasty: Local) -> None:
    """Its first byte ends uvicorn's own timer."""
    with connect(hasty) as connection:
        ask_health(connection)
        connection.sendall(b"G")
        found, seconds = until_closed(connection)
    assert found.startswith(b"HTTP/1.1 408 ")
    assert seconds < IDLE_S + HEAD_S + 1


def test_an_idle_connection_ends(hasty: Local) -> None:
    with connect(hasty) as connection:
        ask_health(connection)
        found, seconds = until_closed(connection)
    assert found == b""
    assert IDLE_S * 0.9 < seconds < IDLE_S + 1


def test_a_body_that_does_not_come_ends(hasty: Local) -> None:
    with connect(hasty) as connection:
        connection.sendall(head(Content_Length=100) + b"{")
        connection.settimeout(BODY_S + 2)
        assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")
        _, seconds = until_closed(connection)
    assert seconds < IDLE_S + HEAD_S + 1


def test_the_rest_of_a_refused_body_is_not_waited_for(hasty: Local) -> None:
    """The answer is given; every further byte used to put off the end of the connection."""
    with connect(hasty) as connection:
        connection.sendall(head(Content_Length=10**9) + b"{")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
        began = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - began < 10:
                connection.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < IDLE_S + HEAD_S + 1


def test_an_answer_that_nobody_reads_ends(hasty: Local) -> None:
    """More than the system and the server keep for a client that does not read."""
    before = cut(hasty, "read_timeout")
    body = json.dumps({**LONG, "stream": True, "logprobs": 20, "n": 2, "return_trace": True}).encode()
    with connect(hasty) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        hasty.wait_until(lambda: len(hasty.server.connections.open) == 1)
        for one in hasty.server.connections.open:
            one.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection.sendall(head(Content_Length=len(body)) + body)
        hasty.wait_until(lambda: cut(hasty, "read_timeout") == before + 1, 60)
        hasty.wait_until(lambda: hasty.server.worker.num_running == 0)


def test_whoever_waits_longest_makes_room(crowded: Local) -> None:
    """All places are taken by connections that say nothing, and everybody else is served at once."""
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(crowded)) for _ in range(PLACES)]
        crowded.wait_until(lambda: len(crowded.server.connections.open) == PLACES)
        ask_health(stack.enter_context(connect(crowded)))
        assert (cut(crowded, "displaced"), cut(crowded, "head_timeout")) == (1, 0)
        assert until_closed(idle[0])[0] == b"", "the first of them was sent away"


def test_nobody_loses_an_answer_to_a_newcomer(hasty: Local) -> None:
    body = json.dumps({**LONG, "stream": True}).encode()
    before = hasty.server.connections.responses["other", "503"]
    with ExitStack() as stack:
        busy = [stack.enter_context(connect(hasty)) for _ in range(PLACES)]
        for one in busy:
            one.sendall(head(Content_Length=len(body)) + body)
            assert one.recv(100).startswith(b"HTTP/1.1 200")
        reply = hasty.http().get("/health")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "too_many_connections")
        assert hasty.server.connections.responses["other", "503"] == before + 1
        assert reply.headers["retry-after"] == "1"
    hasty.wait_until(lambda: hasty.server.worker.num_running == 0)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1 \0\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 20000,
        b"GET /" + b"x" * 100_000,
        head(Content_Length="x"),
        head(Transfer_Encoding="chunked") + b"zz\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nrubbish\r\n\r\n",
    ],
)
def test_what_is_no_http_is_told_so_in_our_shape(hasty: Local, data: bytes) -> None:
    before, counted = cut(hasty, "malformed"), hasty.server.connections.responses["other", "400"]
    with connect(hasty) as connection:
        connection.sendall(data)
        found, seconds = until_closed(connection)
    last = found[found.rindex(b"HTTP/1.1 ") :]
    assert last.startswith(b"HTTP/1.1 400 ")
    assert json.loads(last.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert seconds < IDLE_S
    assert cut(hasty, "malformed") == before + 1
    assert hasty.server.connections.responses["other", "400"] == counted + 1


def test_rubbish_behind_a_refused_head_is_no_error_of_the_server(hasty: Local) -> None:
    with connect(hasty) as connection:
        connection.sendall(head("evil.example", Transfer_Encoding="chunked"))
        assert connection.recv(65536).startswith(b"HTTP/1.1 403 ")
        connection.sendall(b"zz\r\n")
        until_closed(connection)


def test_a_body_that_was_cut_off_is_not_answered(hasty: Local, caplog: pytest.LogCaptureFixture) -> None:
    """What had come of it may be JSON by itself."""
    with caplog.at_level(logging.INFO, "vivace.serve"), connect(hasty) as connection:
        body = json.dumps(LONG).encode()
        connection.sendall(head(Content_Length=len(body) + 9) + body)
        hasty.wait_until(lambda: any(one.cycle is not None for one in hasty.server.connections.open))
        connection.close()
        hasty.wait_until(lambda: not hasty.server.connections.open)
        time.sleep(0.1)
    assert [record.getMessage() for record in caplog.records if "/v1/completions" in record.getMessage()] == []


def test_a_body_in_the_smallest_chunks_holds_up_nobody(hasty: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole buffer of them used to be parsed without a pause.

    What counts is the processor's time between two turns of the loop, not the clock's: it is the same whatever else
    the machine does.
    """
    chunks, turns = head(Transfer_Encoding="chunked") + b"1\r\n[\r\n" * 150_000, list[tuple[int, float]]()
    take = Connection.data_received

    def timed(self: Connection, data: bytes) -> None:
        began = time.thread_time()
        take(self, data)
        turns.append((len(data), time.thread_time() - began))

    monkeypatch.setattr(Connection, "data_received", timed)
    with ExitStack() as stack:
        for connection in [stack.enter_context(connect(hasty)) for _ in range(2)]:
            connection.sendall(chunks)
        hasty.wait_until(lambda: sum(size for size, _ in turns) > 1 << 16)
    assert max(seconds for _, seconds in turns) < PROMISED_S / 4, "a turn of the loop serves several connections"


@pytest.mark.parametrize("name", ["head_timeout_s", "body_timeout_s", "idle_timeout_s", "read_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_wait_without_end_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        ServeConfig(**{name: value})  # type: ignore[arg-type]
