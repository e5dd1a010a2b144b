"""The probe sees what holds up a loop, and nothing else."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from benchmarks.lateness import PROMISED_S, Lateness
from tests.serve.conftest import local
from tests.serve.lag import calmest, loop_lag
from vivace.engine import Engine
from vivace.serve.app import SWITCH_S
from vivace.serve.config import ServeConfig


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop in a thread."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def test_what_was_due_during_a_block_is_late_by_the_rest_of_it() -> None:
    lateness = Lateness(period_s=1.0)
    assert lateness.note(10.0) == 11.0
    assert lateness.note(14.5) == 15.0
    assert lateness.late_s == [0.0, 3.5, 2.5, 1.5, 0.5]
    assert (lateness.quantile(0.5), lateness.p99_s) == (1.5, 3.5)


def test_a_block_is_seen(loop: asyncio.AbstractEventLoop) -> None:
    with loop_lag(loop) as lateness:
        time.sleep(0.2)
        loop.call_soon_threadsafe(time.sleep, 0.4)
        time.sleep(0.6)
    assert 0.2 < lateness.p99_s < lateness.quantile(1.0)
    assert lateness.quantile(1.0) > 0.3


def test_a_block_at_the_very_end_is_seen(loop: asyncio.AbstractEventLoop) -> None:
    with loop_lag(loop) as lateness:
        time.sleep(0.1)
        loop.call_soon_threadsafe(time.sleep, 0.4)
    assert lateness.p99_s > 0.2


def test_an_idle_loop_is_on_time(loop: asyncio.AbstractEventLoop) -> None:
    def measure() -> Lateness:
        with loop_lag(loop) as lateness:
            time.sleep(0.5)
        return lateness

    lateness = calmest(measure)
    assert lateness.p99_s < PROMISED_S, lateness
    assert len(lateness.late_s) > 50


def test_python_changes_threads_sooner_while_a_server_runs(engine: Engine) -> None:
    before = sys.getswitchinterval()
    with local(engine, ServeConfig()):
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert sys.getswitchinterval() == before
