"""Ctrl-C waits for the end of a step, and an engine that it stopped answers as before."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.decode.interrupts import DeferredInterrupts
from vivace.storage.budget import plan_memory
from vivace.storage.convert import write_store
from vivace.storage.io.readers import MapReader


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """Programs in the background may begin with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_waits_and_the_second_does_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []
    with pytest.raises(KeyboardInterrupt), DeferredInterrupts():  # noqa: PT012
        press()
        seen.append("after the first")
    with pytest.raises(KeyboardInterrupt), DeferredInterrupts():  # noqa: PT012
        press()
        press()
        seen.append("after the second")
    assert seen == ["after the first"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_step_in_a_step_waits_for_the_outer_one() -> None:
    seen = []
    with pytest.raises(KeyboardInterrupt), DeferredInterrupts():  # noqa: PT012
        with DeferredInterrupts():
            press()
        seen.append("after the inner one")
    assert seen


def test_other_threads_and_programs_that_ignore_it_are_left_alone() -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with DeferredInterrupts():
                pass
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with DeferredInterrupts():
            press()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def slow_reads(seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    read = MapReader.read

    def slowly(self: MapReader, offset: int, into: memoryview) -> None:
        time.sleep(seconds[0])
        read(self, offset, into)

    with monkeypatch.context() as patched:
        patched.setattr(MapReader, "read", slowly)
        yield


@pytest.mark.parametrize("presses", [1, 2])
def test_a_streamed_model_answers_the_same_after_an_interrupt(
    presses: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "model", layers=8)
    store = write_store(tmp_path / "model", tmp_path / "store", kernels="torch")
    room = int(plan_memory(store, None, 256).num_bytes * 0.75)
    engine = vivace.load(tmp_path / "store", memory=room, reader="mmap", kernels="torch")

    def answer() -> tuple[int, ...]:
        [found] = engine.generate("hello world this is", max_new_tokens=8, method="plain", ignore_eos=True)
        return tuple(found.token_ids)

    plain, seconds = answer(), [0.0]
    with slow_reads(seconds, monkeypatch):
        for place in range(6):
            seconds[0] = 0.02
            timers = [threading.Timer(0.03 + 0.011 * place + 0.005 * again, press) for again in range(presses)]
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                for timer in timers:
                    timer.start()
                answer()
                for timer in timers:
                    timer.join()
                time.sleep(0.01)
            for timer in timers:
                with contextlib.suppress(KeyboardInterrupt):
                    timer.join()
                    time.sleep(0.01)
            seconds[0] = 0.002 * (place % 2)
            assert answer() == plain
