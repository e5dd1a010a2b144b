"""Who leaves stops the work; a full queue and a stopped server say so."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx2
import openai
import pytest

from tests.serve.conftest import DRAFTERS, Reached, local, serving
from vivace.engine import SHIPPED, Engine, load
from vivace.serve.config import ServeConfig

LONG = {"prompt": "abc", "max_tokens": 900, "ignore_eos": True, "method": "plain"}


@pytest.fixture(scope="module")
def narrow(engine: Engine) -> Iterator[Reached]:
    """One slot and two places in the queue, on kernels slow enough that a long answer is still being written."""
    with local(
        load(engine.folder, kernels="torch"), ServeConfig(num_slots=1, max_queue=2, served_model_name="tiny")
    ) as reached:
        yield reached


def raw_request(server: Reached, body: dict[str, object]) -> socket.socket:
    """A request on a bare socket, its answer not read."""
    url = httpx2.URL(server.url)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((url.host, url.port), timeout=30)
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_slot(narrow: Reached, stream: bool) -> None:
    narrow.wait_idle()
    done = narrow.metric("vivace_request_success_total")
    connection = raw_request(narrow, {**LONG, "stream": stream})
    narrow.wait_until(lambda: narrow.is_running)
    connection.close()
    narrow.wait_idle()
    assert narrow.metric("vivace_request_success_total") == done, "it was cancelled, not finished"
    assert narrow.client().completions.create(model="tiny", prompt="abc", max_tokens=3).usage.completion_tokens == 3


def test_a_client_that_is_killed_frees_its_slot(narrow: Reached) -> None:
    program = (
        "from openai import OpenAI\n"
        f"stream = OpenAI(base_url='{narrow.url}/v1', api_key='x').completions.create(\n"
        "    model='tiny', prompt='abc', max_tokens=900, stream=True, extra_body={'ignore_eos': True})\n"
        "for chunk in stream: print(chunk.choices[0].text, flush=True)\n"
    )
    client = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert client.stdout is not None
    client.stdout.readline()
    client.send_signal(signal.SIGKILL)
    client.wait()
    narrow.wait_idle()
    assert narrow.http().get("/health").status_code == 200


def test_a_full_queue_says_so(narrow: Reached) -> None:
    narrow.wait_idle()
    first = raw_request(narrow, {**LONG, "stream": True})
    narrow.wait_until(lambda: narrow.is_running)
    second = raw_request(narrow, {**LONG, "n": 2})
    narrow.wait_until(lambda: narrow.metric("vivace_num_requests_waiting") == 2)
    with pytest.raises(openai.RateLimitError, match="1 run and 2 wait") as caught:
        narrow.client().completions.create(model="tiny", prompt="abc", max_tokens=3)
    assert caught.value.response.headers["retry-after"] == "1"
    with pytest.raises(openai.RateLimitError, match="3 sequences"):
        narrow.client().completions.create(model="tiny", prompt="abc", max_tokens=3, n=3)
    second.close()
    narrow.wait_until(lambda: narrow.metric("vivace_num_requests_waiting") == 0)
    assert narrow.is_running, "the other one goes on"
    first.close()
    narrow.wait_idle()


def test_priority_leaves_the_queue_first(narrow: Reached) -> None:
    narrow.wait_idle()
    blocker = raw_request(narrow, LONG)
    narrow.wait_until(lambda: narrow.is_running)
    with ThreadPoolExecutor(2) as pool:

        def ask(priority: int) -> float:
            body = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True, "priority": priority}
            reply = narrow.http().post("/v1/completions", json=body).json()
            return float(reply["metrics"]["queue_time_ms"])

        last = pool.submit(ask, 1)
        narrow.wait_until(lambda: narrow.metric("vivace_num_requests_waiting") == 1)
        first = pool.submit(ask, -1)
        narrow.wait_until(lambda: narrow.metric("vivace_num_requests_waiting") == 2)
        blocker.close()
        assert first.result() < last.result()


BOUND = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}}


@pytest.mark.multiprocess
def test_a_killed_server_starts_again_and_stops_in_time(tmp_path: Path) -> None:
    """The model that ships, with its drafters, while greedy, drawn and bound answers are written."""
    with serving(SHIPPED, tmp_path / "killed.log", *DRAFTERS) as running:
        port = httpx2.URL(running.url).port
        bodies = [
            {**LONG, "method": "auto"},
            {**LONG, "method": "eagle", "model": "eagle", "temperature": 1.0, "seed": 1},
        ]
        connections = [raw_request(running, {**body, "stream": True}) for body in bodies]
        for connection in connections:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        reply = running.http().post(
            "/v1/completions", json={"prompt": "abc", "max_tokens": 9, "temperature": 1, **BOUND}
        )
        assert json.loads(reply.json()["choices"][0]["text"]) in ("a", "b")
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait()
        for connection in connections:
            connection.settimeout(10)
            with suppress(ConnectionError):
                while connection.recv(65536):
                    pass  # what was sent before comes, then the end: nobody waits for ever
    words = ("--port", str(port), "--grace", "4")
    with serving(SHIPPED, tmp_path / "again.log", *words) as again, ThreadPoolExecutor(1) as pool:
        endless = raw_request(again, {**LONG, "n": 15, "stream": True})
        again.wait_until(lambda: again.is_running)
        body = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "temperature": 1.0, "seed": 2}
        short = pool.submit(lambda: again.http().post("/v1/completions", json=body))
        again.wait_until(lambda: again.metric("vivace_num_requests_running") == 16)
        again.process.send_signal(signal.SIGTERM)
        assert short.result().json()["usage"]["completion_tokens"] == 60, "an answer that runs may end"
        assert again.process.wait(30) in (0, -signal.SIGTERM), "one that does not end is cut off"
        assert "Traceback" not in again.log.read_text()
        endless.close()
