"""Alive, ready, late and counted: what a server says of itself."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import httpx2
import pytest
import torch

from tests.serve.conftest import Local, local
from tests.serve.test_lifetime import LONG, raw_request
from vivace.decode.session import Session
from vivace.engine import Engine, Options
from vivace.serve.config import ServeConfig
from vivace.serve.loop_lag import BUCKETS, LoopLag
from vivace.serve.worker import Job

STALL_S = 0.4


@pytest.fixture(scope="module")
def watched(engine: Engine) -> Iterator[Local]:
    """A server that calls itself hung soon."""
    with local(engine, ServeConfig(stall_timeout_s=STALL_S, num_slots=2, served_model_name="tiny")) as reached:
        yield reached


@pytest.fixture
def http(watched: Local) -> Iterator[httpx2.Client]:
    with watched.http() as found:
        yield found


def counted(http: httpx2.Client, name: str, **labels: str) -> float:
    """A sample of a metric; 0 where there is none with these labels."""
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    found = 0.0
    for line in http.get("/metrics").text.splitlines():
        match = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line)
        if match and match[1] == name and wanted <= set(match[2].split(",")):
            found += float(match[3])
    return found


def states(http: httpx2.Client) -> dict[str, float]:
    names = ("received", "finished", "failed", "cancelled")
    return {name: counted(http, "vivace_requests_total", state=name) for name in names}


def test_a_server_that_waits_is_alive_and_ready(watched: Local, http: httpx2.Client) -> None:
    time.sleep(2 * STALL_S)  # longer than a step may take: resting is not hanging
    for path in ("/health", "/health/live", "/health/ready"):
        assert (http.get(path).status_code, http.get(path).json()) == (200, {"status": "ok"})
        assert (http.head(path).status_code, http.head(path).content) == (200, b"")
        assert http.head(path).headers["Content-Length"] == http.get(path).headers["Content-Length"]
    assert counted(http, "vivace_worker_busy_seconds") == 0


def test_a_worker_that_hangs_is_told(watched: Local, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    step, goes_on = Session.step, threading.Event()

    def hang(session: Session) -> object:
        goes_on.wait(30)
        return step(session)

    monkeypatch.setattr(Session, "step", hang)
    connection = raw_request(watched, {"prompt": "abc", "max_tokens": 3, "stream": True})
    try:
        watched.wait_until(lambda: counted(http, "vivace_worker_busy_seconds") > STALL_S)
        for path in ("/health", "/health/live", "/health/ready"):
            reply = http.get(path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "stalled")
            assert (http.head(path).status_code, http.head(path).content) == (503, b"")
    finally:
        goes_on.set()
    watched.wait_idle()
    assert http.get("/health/live").status_code == http.get("/health/ready").status_code == 200
    connection.close()


def test_many_short_steps_are_no_hanging(watched: Local, http: httpx2.Client) -> None:
    with raw_request(watched, {**LONG, "stream": True}):
        watched.wait_until(lambda: watched.is_running)
        until = time.monotonic() + 3 * STALL_S
        while time.monotonic() < until and watched.is_running:
            assert http.get("/health/live").status_code == 200


def test_a_stopping_server_is_alive_and_not_ready(engine: Engine) -> None:
    with local(engine, ServeConfig()) as reached, reached.http() as http:
        goes_on = threading.Event()

        def hold(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            goes_on.wait(30)
            return scores

        request = engine.request("abc", Options(max_new_tokens=3, method="plain", raw=True))
        reached.server.worker.submit([Job(replace(request, processors=(hold,)))])
        reached.wait_until(lambda: reached.server.worker.num_running == 1)
        stopping = threading.Thread(target=reached.server.worker.close)
        stopping.start()
        reached.wait_until(lambda: not reached.server.worker.is_healthy)
        assert http.get("/health/live").status_code == 200
        for path in ("/health", "/health/ready"):
            assert (http.get(path).status_code, http.get(path).json()["error"]["code"]) == (503, "stopping")
        goes_on.set()
        stopping.join()
        reached.wait_until(lambda: reached.server.worker.has_died)
        reply = http.get("/health/live")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "dead")


def test_every_sequence_is_counted_once(watched: Local, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.wait_idle()
    before = states(http)
    body = {"prompt": "abc", "max_tokens": 3, "n": 2}
    assert http.post("/v1/completions", json=body).status_code == 200
    http.post("/v1/completions", json={**body, "stream": True})
    connection = raw_request(watched, {**LONG, "n": 3})
    watched.wait_until(lambda: watched.is_running)
    connection.close()
    watched.wait_idle()

    def explode(_: Session) -> object:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "step", explode)
        assert http.post("/v1/completions", json={**body, "n": 1}).status_code == 500
    watched.wait_until(lambda: states(http)["received"] == before["received"] + 8)
    grown = {name: count - before[name] for name, count in states(http).items()}
    assert grown == {"received": 8, "finished": 4, "cancelled": 3, "failed": 1}


def test_every_response_is_counted(watched: Local, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def responses(route: str, status: int) -> float:
        return counted(http, "vivace_http_responses_total", route=route, status=str(status))

    asked = [
        ("/v1/completions", 400, lambda: http.post("/v1/completions", json={"prompt": 1})),
        ("/v1/completions", 415, lambda: http.post("/v1/completions", content=b"{}")),
        ("/v1/models", 403, lambda: http.get("/v1/models", headers={"Host": "evil.example"})),
        ("/v1/models/{name:path}", 404, lambda: http.get("/v1/models/none")),
        ("other", 404, lambda: http.get("/nowhere/at-all")),
        ("/version", 200, lambda: http.get("/version")),
    ]
    for route, status, ask in asked:
        before = responses(route, status)
        assert ask().status_code == status
        assert responses(route, status) == before + 1, (route, status)
    monkeypatch.setattr(watched.server.catalog, "cards", lambda _: 1 / 0)
    before = responses("/v1/models", 500)
    reply = http.get("/v1/models", headers={"X-Request-Id": "seventh"})
    assert (reply.status_code, reply.headers["X-Request-Id"]) == (500, "seventh")
    assert reply.json()["error"]["type"] == "server_error"
    assert responses("/v1/models", 500) == before + 1, "what nobody thought of counts too"


def test_a_block_of_the_loop_weighs_as_long_as_it_lasts() -> None:
    lag = LoopLag(period_s=0.02)
    due = lag.note(10.0, 10.0)
    due = lag.note(due, 11.0)
    assert due == pytest.approx(11.02)
    assert (sum(lag.counts), lag.worst_s) == (51, pytest.approx(0.98))
    ends = dict(lag.buckets())
    assert ends["+Inf"] == 51
    assert ends["0.5"] == pytest.approx(26, abs=1), "half of what was due meanwhile was later than half of the block"
    assert lag.sum_s == pytest.approx(0.98 * 50 / 2, rel=0.02)


def test_the_lag_of_the_loop_is_shown(watched: Local, http: httpx2.Client) -> None:
    before = watched.server.figures.lag.counts[:]
    loop = watched.server.calls.loop
    assert loop is not None
    loop.call_soon_threadsafe(time.sleep, 0.6)
    watched.wait_until(lambda: sum(watched.server.figures.lag.counts) > sum(before) + 30)
    late = sum(watched.server.figures.lag.counts[BUCKETS.index(0.1) + 1 :]) - sum(before[BUCKETS.index(0.1) + 1 :])
    assert late >= 20, "half a second of events every 20 ms"
    assert counted(http, "vivace_event_loop_lag_worst_seconds") > 0.5
    text = http.get("/metrics").text
    assert 'vivace_event_loop_lag_seconds_bucket{le="0.1",model_name="tiny"}' in text
