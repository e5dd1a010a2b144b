"""Many clients for a while: random lengths and methods, schemas, dropped streams, malformed bodies."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

import vivace
from tests.serve.conftest import Running
from vivace.engine import SHIPPED, Engine
from vivace.prompts import packaged_prompts

LONGEST = 60
PROMPTS = [str(prompt.request) for prompt in packaged_prompts("e2e")[:16]]
MALFORMED = (b"{", b"\xff", b'{"messages": 1}', b'{"messages": [], "nonsense": 1}', b"[" * 5000)
KINDS = {"whole": 4, "stream": 4, "bound": 2, "drop": 2, "malformed": 2}
COLOURS = ("red", "green", "blue")


class Client(threading.Thread):
    """Asks until it is time to stop."""

    def __init__(
        self, number: int, server: Running, models: Sequence[str], wanted: Mapping[str, tuple[int, ...]], until: float
    ) -> None:
        super().__init__()
        self.random = random.Random(number)
        self.server, self.models, self.wanted, self.until = server, models, wanted, until
        self.seen: Counter[str] = Counter()
        self.tokens = 0
        self.gaps: list[float] = []
        """Seconds between two events of a stream that carry tokens."""
        self.wrong: list[object] = []

    def run(self) -> None:
        with self.server.http() as http:
            while time.monotonic() < self.until:
                kind = self.random.choices([*KINDS], [*KINDS.values()])[0]
                self.seen[kind] += 1
                try:
                    getattr(self, kind)(http)
                except Exception as error:  # noqa: BLE001 - told by the test
                    self.wrong.append((kind, repr(error)))

    def body(self) -> dict[str, Any]:
        choose = self.random.choice
        return {
            "model": choose(self.models),
            "messages": [{"role": "user", "content": choose(PROMPTS)}],
            "max_tokens": self.random.randint(1, LONGEST),
            "method": choose(("plain", "lookup", "auto")),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def compare(self, body: dict[str, Any], ids: list[int]) -> None:
        self.tokens += len(ids)
        if tuple(ids) != self.wanted[body["messages"][0]["content"]][: body["max_tokens"]]:
            self.wrong.append((body, ids))

    def whole(self, http: httpx2.Client) -> None:
        body = self.body()
        self.compare(body, http.post("/v1/chat/completions", json=body).json()["choices"][0]["token_ids"])

    def stream(self, http: httpx2.Client, stop_after: int | None = None) -> None:
        body, ids, before = self.body(), [], 0.0
        with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply:
            for line in reply.iter_lines():
                for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                    fresh = choice.get("token_ids", [])
                    if fresh:
                        now = time.monotonic()
                        self.gaps += [now - before] if before else []
                        before = now
                    ids += fresh
                if stop_after is not None and len(ids) > stop_after:
                    return
        self.compare(body, ids)

    def bound(self, http: httpx2.Client) -> None:
        """Drawn within a schema."""
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": COLOURS}}}
        body = {**self.body(), "max_tokens": 20, "temperature": 1.0, "ignore_eos": False, "response_format": schema}
        text = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        if json.loads(text) not in COLOURS:
            self.wrong.append((body, text))

    def drop(self, http: httpx2.Client) -> None:
        self.stream(http, stop_after=self.random.randrange(30))

    def malformed(self, http: httpx2.Client) -> None:
        body = self.random.choice(MALFORMED)
        reply = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
        if reply.status_code != 400 or set(reply.json()) != {"error"}:
            self.wrong.append((body, reply.status_code, reply.text))


def resident(server: Running) -> int:
    """KiB of memory."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def busy(
    server: Running, engine: Engine, models: Sequence[str], *, seconds: float, clients: int
) -> tuple[list[Client], list[int]]:
    """Clients after they have asked for so long, and the server's memory meanwhile, from a quarter of the time on."""
    answers = engine.generate(PROMPTS, max_new_tokens=LONGEST, method="plain", ignore_eos=True, do_sample=False)
    wanted = {prompt: answer.token_ids for prompt, answer in zip(PROMPTS, answers, strict=True)}
    until = time.monotonic() + seconds
    found = [Client(number, server, models, wanted, until) for number in range(clients)]
    for client in found:
        client.start()
    time.sleep(seconds / 4)
    memory = [resident(server)]
    while time.monotonic() < until:
        time.sleep(seconds / 8)
        memory.append(resident(server))
    for client in found:
        client.join()
    server.wait_idle()
    assert [wrong for client in found for wrong in client.wrong] == []
    assert "Traceback" not in server.log.read_text()
    return found, [*memory, resident(server)]


def seen(clients: Sequence[Client]) -> Counter[str]:
    return sum((client.seen for client in clients), Counter())


@pytest.mark.multiprocess
def test_a_few_seconds_of_everything(shipped: Running) -> None:
    """The model that ships, by its own drafters and those of its adapters."""
    models = [SHIPPED.name, "eagle", "medusa", "multirate", "multistream"]
    clients, _ = busy(shipped, vivace.load(), models, seconds=5, clients=8)
    assert seen(clients).keys() == KINDS.keys()


@pytest.mark.slow
def test_a_minute_of_everything(server: Running, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    clients, memory = busy(server, engine, ("tiny", "alpha"), seconds=60, clients=32)
    assert min(seen(clients).values()) > 10
    gaps = sorted(gap for client in clients for gap in client.gaps)
    p50, p99 = (1e3 * gaps[int(share * len(gaps))] for share in (0.5, 0.99))
    with capsys.disabled():
        print(f"\n{dict(seen(clients))}, {sum(client.tokens for client in clients)} tokens")  # noqa: T201
        print(f"between tokens: p50 {p50:.1f} ms, p99 {p99:.1f} ms; memory {memory} KiB")  # noqa: T201
    assert max(memory) < 1.05 * memory[0], "memory stays flat"
