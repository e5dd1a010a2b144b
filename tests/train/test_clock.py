"""Seconds of work: of processors, or of a GPU that has done all it was given."""

from __future__ import annotations

import time

import pytest
import torch

from vivace.train.clock import work_seconds


def test_a_cpu_counts_processors_and_a_gpu_the_clock_once_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(time, "process_time", lambda: 3.0)
    monkeypatch.setattr(time, "monotonic", lambda: 5.0 + len(waited))
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    assert work_seconds(torch.device("cpu")) == 3.0
    assert not waited
    assert work_seconds(torch.device("cuda", 0)) == 6.0
    assert waited == [torch.device("cuda", 0)]
