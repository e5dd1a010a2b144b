"""The threads behind a call: as many as asked for and no more, one caller at a time, new ones in a child."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.kernels.test_row_invariance import normal
from vivace.kernels.native import Matrix, NativeBody, pack

BF16 = torch.bfloat16
TASKS = Path("/proc/self/task")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork") or not TASKS.is_dir(), reason="needs fork and /proc")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def num_tasks() -> int:
    return len(list(TASKS.iterdir()))


def settles_at(count: int) -> bool:
    """A thread that was joined may be seen for a moment longer."""
    patience = time.monotonic() + 3
    while num_tasks() != count and time.monotonic() < patience:
        time.sleep(0.01)
    return num_tasks() == count


def holds_in_child(claim: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a child that hangs
        holds = False
        try:
            holds = claim()
        finally:
            os._exit(0 if holds else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def product(body: NativeBody, rows: int, width: int) -> Callable[[], object]:
    m = Matrix(pack(normal(width, width, dtype=BF16)), None, width, width)
    x = normal(rows, width, dtype=BF16, seed=1)

    def call() -> None:
        with torch.inference_mode():
            body.linear(m, x)

    return call


def test_a_child_starts_its_own(body: NativeBody) -> None:
    """Those the parent has do not survive a fork; a child that believed in them would work alone for ever."""
    call = product(body, 4, 256)
    torch.set_num_threads(3)
    call()

    def claim() -> bool:
        before = num_tasks()
        call()
        return num_tasks() == before + 2

    assert holds_in_child(claim)


def test_callers_at_once_start_no_more_than_asked_for(body: NativeBody) -> None:
    call = product(body, 4, 256)

    def claim() -> bool:
        torch.set_num_threads(100)
        together = threading.Barrier(4)

        def meet() -> None:
            together.wait()
            call()

        before = num_tasks()
        callers = [threading.Thread(target=meet) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        return settles_at(before + 99)

    assert all(holds_in_child(claim) for _ in range(3))


def test_nobody_waits_for_another_caller(body: NativeBody) -> None:
    """A small call beside a long one ends long before it."""
    torch.set_num_threads(2)
    long, short = product(body, 2048, 2048), product(body, 1, 64)
    short()

    def ends_early() -> bool:
        times: list[float] = []

        def run_long() -> None:
            times.append(time.perf_counter())
            long()
            times.append(time.perf_counter())

        caller = threading.Thread(target=run_long)
        caller.start()
        while not times:
            time.sleep(0)
        time.sleep(0.005)
        short()
        ended = time.perf_counter()
        caller.join()
        return ended < (times[0] + times[1]) / 2

    assert any(ends_early() for _ in range(10))


def test_threads_that_wait_for_long_sleep(body: NativeBody) -> None:
    """Between two calls of a decoding step they look out; a process that decodes nothing uses no processor."""
    call = product(body, 4, 256)
    torch.set_num_threads(2)
    call()
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
