"""A server on two ranks answers many clients as one process answers each of them, also when some of them leave."""

from __future__ import annotations

import json
import signal
import socket
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import vivace
from tests.parallel.ranks import Ranks, free_port
from tests.parallel.test_auto import choosing
from tests.parallel.test_failures import wait_until_served
from tests.tiny_checkpoints import make_checkpoint
from vivace.cli.app import run

pytestmark = pytest.mark.multiprocess

NUM_CLIENTS = 16


LONGER = 290
"""Tokens more of every other client's prompt where prompts are read together, which have more than one chunk."""


def prompt_of(client: int) -> list[int]:
    return [(7 * client + 3 * place) % 200 + 20 for place in range(5 + 3 * client + client % 2 * LONGER)]


def body_of(client: int, **more: Any) -> bytes:
    asked = {"prompt": prompt_of(client), "max_tokens": 12 + client, "temperature": 0, "ignore_eos": True}
    return json.dumps(asked | more).encode()


def text_of(port: int, client: int) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body_of(client))
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["text"])


def leave_in_the_middle(port: int, client: int) -> None:
    """Ask for a long answer and go away after its first bytes."""
    body = body_of(client, max_tokens=180, stream=True)
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert connection.recv(64).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("mode", ["tensor", "runahead", "auto"])
def test_sixteen_clients_and_two_that_leave(mode: str, tmp_path: Path) -> None:
    """With ``auto`` half of them lie in stages."""
    folder, port = make_checkpoint(tmp_path, context=640), free_port()
    engine = vivace.load(folder, kernels="torch", dtype="float32")
    alone = [
        engine.generate(prompt_of(client), method="plain", max_new_tokens=12 + client, ignore_eos=True)[0].text
        for client in range(NUM_CLIENTS)
    ]
    flags = [
        "--parallel",
        mode,
        "--kernels",
        "torch",
        "--dtype",
        "float32",
        "--max-num-seqs",
        "6",
        "--method",
        "lookup",
    ]

    def work() -> None:
        choosing(lambda _: "pipeline")
        raise SystemExit(run(["serve", "--model", str(folder), "--port", str(port), *flags]))

    ranks = Ranks(2, work)
    try:
        wait_until_served(port)
        answers: dict[int, str] = {}

        def ask(client: int) -> None:
            answers[client] = text_of(port, client)

        threads = [threading.Thread(target=ask, args=(client,)) for client in range(NUM_CLIENTS)]
        threads += [threading.Thread(target=leave_in_the_middle, args=(port, client)) for client in (3, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [answers.get(client) for client in range(NUM_CLIENTS)] == alone
        ranks.processes[0].terminate()
        ranks.processes[0].join(20)
        ranks.processes[1].join(20)
        assert [process.exitcode for process in ranks.processes] == [-signal.SIGTERM, 0]
    finally:
        ranks.kill()
