"""Streams beside their paper: its counts and ratios, and only runs of streams."""

from __future__ import annotations

from benchmarks.stream_tables import PAPER, beside_paper, weights


def test_counts_are_the_papers() -> None:
    text = weights()
    assert "| 40,960 | 428,605,440 | 10,464 |" in text
    assert "| 81,920 | 591,396,864 | 7,219 |" in text
    assert "| 5,120 | 4,456,448 | 870 |" in text


def test_only_runs_of_streams_stand_beside_the_paper() -> None:
    run = {"tokens_per_target_pass": 2.5, "speedup": 1.25}
    text = beside_paper([("a", run | {"method": "multistream"}), ("b", run | {"method": "plain"})])
    assert "| a | lossless | 2.50 | 1.25x |" in text
    assert "| b |" not in text
    assert text.count("the paper") == len(PAPER)
