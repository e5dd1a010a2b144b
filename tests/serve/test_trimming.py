"""Memory that was freed goes back to the system while a server runs, and helpers give way to it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from vivace.kernels.heap import trimmer
from vivace.serve import grammar_trial, trimming
from vivace.serve.grammars import Trials

HOARD = """
import os, sys
from vivace.kernels.heap import trimmer
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
before = resident()
kept = [bytearray(100_000) for _ in range(2000)]
last = kept[-1]  # holds the top of the heap, so that nothing below it is given back by itself
del kept
held = resident() - before
trimmer()(0)
print(held, resident() - before)
"""


def test_what_is_free_is_given_back() -> None:
    if trimmer() is None:
        pytest.skip("this C library has no malloc_trim")
    done = subprocess.run([sys.executable, "-c", HOARD], capture_output=True, text=True, check=True)
    held, left = map(int, done.stdout.split())
    assert held > 100
    assert left < held / 2


def test_it_goes_on_until_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(trimming, "trimmer", lambda: calls.append)
    monkeypatch.setattr(trimming, "PERIOD_S", 0.0)

    async def run() -> None:
        task = asyncio.create_task(trimming.trim())
        while len(calls) < 3:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    assert set(calls) == {0}


def test_a_system_without_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trimming, "trimmer", lambda: None)
    asyncio.run(asyncio.wait_for(trimming.trim(), 10))


def test_trials_of_grammars_give_way() -> None:
    trials = Trials()
    try:
        trials("json", '{"type": "integer"}')
        assert trials._process is not None
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, trials._process.pid) == own + grammar_trial.GIVES_WAY
    finally:
        trials.close()
