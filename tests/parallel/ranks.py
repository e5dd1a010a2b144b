"""Ranks as forked processes, without torchrun: they end with the test, whatever happens."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

import vivace.parallel.world as worlds

LIMIT_S = 60.0


def free_port() -> int:
    """A port that nobody listens on."""
    with closing(socket.socket()) as asking:
        asking.bind(("127.0.0.1", 0))
        return int(asking.getsockname()[1])


class Ranks:
    """Processes that run one function each, with the environment that torchrun would give them."""

    def __init__(self, count: int, function: Callable[..., Any], *args: Any) -> None:
        port, context = free_port(), get_context("fork")
        self.answers: list[Connection] = []
        self.processes = []
        for rank in range(count):
            here, there = context.Pipe()
            environment = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
            values = {name: str(value) for name, value in environment.items()} | {"MASTER_ADDR": "127.0.0.1"}
            process = context.Process(target=_run, args=(values, there, function, args), daemon=True)
            process.start()
            there.close()
            self.answers.append(here)
            self.processes.append(process)

    def results(self, limit_s: float = LIMIT_S) -> list[Any]:
        """What each rank returned, or ``Ended(exit status)`` where it ended without; then no process is left."""
        until = time.monotonic() + limit_s
        found: list[Any] = []
        try:
            for answer, process in zip(self.answers, self.processes, strict=True):
                if not answer.poll(max(0.0, until - time.monotonic())):
                    raise AssertionError(f"ranks hang: {[p.exitcode for p in self.processes]}")
                try:
                    found.append(pickle.loads(answer.recv_bytes()))
                except EOFError:
                    process.join(max(0.1, until - time.monotonic()))
                    found.append(Ended(process.exitcode))
            return found
        finally:
            self.kill()

    def kill(self) -> None:
        """End all processes."""
        for process in self.processes:
            if process.exitcode is None:
                process.join(0.5)
            if process.exitcode is None:
                process.kill()
            process.join()


class Ended:
    """The exit status of a rank that returned nothing."""

    def __init__(self, status: int | None) -> None:
        self.status = status

    def __repr__(self) -> str:
        return f"Ended({self.status})"


def run_ranks(count: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
    """What ``function(*args)`` returns on each rank."""
    return Ranks(count, function, *args).results(limit_s)


def _run(environment: dict[str, str], answer: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the process dies with the one that started it
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        answer.send_bytes(pickle.dumps(function(*args)))  # tensors go by value
    finally:
        worlds.leave()  # forked processes run nothing at their exit
        answer.close()
