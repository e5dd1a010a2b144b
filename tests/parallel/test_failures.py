"""Whatever happens to a rank, rank 0 says it in one line, no rank ends with status 0, and no process is left."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vivace
from tests.parallel.ranks import Ended, Ranks, free_port, run_ranks
from tests.tiny_checkpoints import make_checkpoint
from vivace.cli.app import run
from vivace.errors import WorldError
from vivace.parallel import following

pytestmark = pytest.mark.multiprocess


def is_rank(rank: int) -> bool:
    return os.environ["RANK"] == str(rank)


def message(work: Callable[[], Any]) -> str:
    """The one line with which rank 0 fails."""
    try:
        work()
    except WorldError as error:
        return str(error)
    return "nothing happened"


def together(folder: Path, **settings: Any) -> Any:
    return vivace.load(folder, parallel="tensor", kernels="torch", **{"timeout": 30.0} | settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model")


@pytest.mark.parametrize("count", [2, 3])
def test_a_rank_without_the_checkpoint(count: int, folder: Path) -> None:
    def work() -> str:
        return message(lambda: together(folder.with_name("nowhere") if is_rank(1) else folder))

    first, *others = run_ranks(count, work)
    assert first.startswith(f"rank 1: there is no checkpoint directory {folder.with_name('nowhere')}; give ")
    assert [other.status for other in others] == [1] * (count - 1)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"dtype": "bfloat16"}, "rank 1 has dtype 'bfloat16', rank 0 has 'float32'"),
        ({"kv": "int8"}, "rank 1 has keys and values 'int8', rank 0 has 'same'"),
        ({"path": "other"}, "rank 1 has checkpoint '"),
    ],
)
def test_ranks_that_differ(settings: dict[str, str], found: str, folder: Path) -> None:
    other = make_checkpoint(folder.with_name("other"), seed=1)

    def work() -> str:
        own = dict(settings) if is_rank(1) else {}
        return message(lambda: together(other if own.pop("path", None) else folder, **own))

    first, second = run_ranks(2, work)
    assert first.startswith(found)
    assert first.endswith("start all ranks with the same package, checkpoint and flags")
    assert second.status == 1


@pytest.mark.parametrize("num_passes", [0, 4])
@pytest.mark.parametrize("count", [2, 3])
def test_a_rank_that_dies_in_prefill_or_while_decoding(num_passes: int, count: int, folder: Path) -> None:
    def work() -> str:
        if is_rank(1):
            _in_pass(num_passes, lambda: os._exit(9))
        return message(lambda: together(folder).generate(list(range(40)), method="plain", max_new_tokens=20))

    first, *others = run_ranks(count, work)
    assert first == "rank 1 has ended"
    assert [other.status for other in others] == [9, 1][: count - 1]


def test_a_rank_that_hangs(folder: Path) -> None:
    def work() -> str:
        if is_rank(1):
            _in_pass(2, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        engine = together(folder, timeout=1.5)
        return message(lambda: engine.generate([5, 6, 7], method="plain", max_new_tokens=20))

    ranks = Ranks(2, work)
    try:
        assert ranks.answers[0].poll(30)
        assert b"rank 1 has not answered rank 0 for 1.5 s" in ranks.answers[0].recv_bytes()
    finally:
        ranks.kill()


def test_a_rank_that_fails_in_a_pass_is_quoted(folder: Path) -> None:
    def fail() -> None:
        raise MemoryError("none left")

    def work() -> str:
        if is_rank(1):
            _in_pass(1, fail)
        return message(lambda: together(folder).generate([5, 6, 7], method="plain", max_new_tokens=20))

    first, second = run_ranks(2, work)
    assert first == "rank 1: MemoryError: none left"
    assert second.status == 1


def test_what_is_dead_stays_dead_and_says_why(folder: Path) -> None:
    def work() -> list[str]:
        if is_rank(1):
            _in_pass(1, lambda: os._exit(9))
        engine = together(folder)
        return [message(lambda: engine.generate([5, 6, 7], max_new_tokens=9)) for _ in range(2)]

    first, _ = run_ranks(2, work)
    assert first == ["rank 1 has ended"] * 2


def test_a_server_whose_follower_is_killed_ends(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    flags = ["--parallel", "tensor", "--method", "plain", "--kernels", "torch", "--max-num-seqs", "4"]

    def work() -> None:
        raise SystemExit(run(["serve", "--model", str(folder), "--port", str(port), *flags]))

    ranks = Ranks(2, work)
    try:
        wait_until_served(port)
        answers: list[int] = []
        follower = ranks.processes[1]
        assert follower.pid is not None
        os.kill(follower.pid, signal.SIGSTOP)  # however fast the machine, answers wait for it
        asking = [threading.Thread(target=lambda: answers.append(ask(port))) for _ in range(3)]
        for thread in asking:
            thread.start()
        time.sleep(0.5)
        follower.kill()
        for thread in asking:
            thread.join(20)
        assert answers == [503] * 3
        assert [type(found) for found in ranks.results(20)] == [Ended, Ended]
        assert [process.exitcode for process in ranks.processes] == [1, -9]
        assert "error: rank 1 has ended\n" in capfd.readouterr().err
    finally:
        ranks.kill()


def wait_until_served(port: int) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server does not answer")


def ask(port: int) -> int:
    """The status of a long answer."""
    body = {"prompt": [5, 6, 7], "max_tokens": 240, "ignore_eos": True}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def _in_pass(number: int, happen: Callable[[], None]) -> None:
    """Let something happen to this process before it computes a pass."""
    count, original = [0], following.Follower._run

    def counted(self: Any, numbers: list[int], rest: memoryview) -> None:
        if count[0] == number:
            happen()
        count[0] += 1
        original(self, numbers, rest)

    following.Follower._run = counted  # type: ignore[method-assign] - of a process that ends with the test
