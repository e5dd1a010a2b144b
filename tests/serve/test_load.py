"""Many clients for a while: random lengths and methods, dropped streams, malformed bodies."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.serve.conftest import Running
from vivace.engine import Engine
from vivace.prompts import packaged_prompts

SECONDS = 60
CLIENTS = 32
LONGEST = 60
PROMPTS = [str(prompt.request) for prompt in packaged_prompts("e2e")[:16]]
MALFORMED = (b"{", b"\xff", b'{"messages": 1}', b'{"messages": [], "nonsense": 1}', b"[" * 5000)
KINDS = {"whole": 4, "stream": 4, "drop": 2, "malformed": 2}


class Client(threading.Thread):
    """Asks until it is time to stop."""

    def __init__(self, number: int, server: Running, wanted: dict[str, tuple[int, ...]], until: float) -> None:
        super().__init__()
        self.random = random.Random(number)
        self.server, self.wanted, self.until = server, wanted, until
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
            "model": choose(("tiny", "alpha")),
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


@pytest.mark.slow
def test_a_minute_of_everything(server: Running, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    answers = engine.generate(PROMPTS, max_new_tokens=LONGEST, method="plain", ignore_eos=True)
    wanted = {prompt: answer.token_ids for prompt, answer in zip(PROMPTS, answers, strict=True)}
    until = time.monotonic() + SECONDS
    clients = [Client(number, server, wanted, until) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    time.sleep(SECONDS / 4)
    memory = [resident(server)]
    while time.monotonic() < until:
        time.sleep(SECONDS / 8)
        memory.append(resident(server))
    for client in clients:
        client.join()
    assert [wrong for client in clients for wrong in client.wrong] == []
    seen: Counter[str] = sum((client.seen for client in clients), Counter())
    assert min(seen[kind] for kind in KINDS) > 10
    server.wait_idle()
    memory.append(resident(server))
    gaps = sorted(gap for client in clients for gap in client.gaps)
    p50, p99 = (1e3 * gaps[int(share * len(gaps))] for share in (0.5, 0.99))
    with capsys.disabled():
        print(f"\n{dict(seen)}, {sum(client.tokens for client in clients)} tokens")  # noqa: T201
        print(f"between tokens: p50 {p50:.1f} ms, p99 {p99:.1f} ms; memory {memory} KiB")  # noqa: T201
    assert max(memory) < 1.05 * memory[0], "memory stays flat"
    assert "Traceback" not in server.log.read_text()
