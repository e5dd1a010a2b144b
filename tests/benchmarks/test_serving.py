"""The comparison of servers: turns, medians and when it ends, on servers that are made up."""

from __future__ import annotations

import argparse
import time

import pytest

from benchmarks import serving
from benchmarks.serving import Run, Server

SECONDS = {"ours": 2.0, "theirs": 5.0}


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(server: Server, prompts: list[str], concurrency: int, _: int) -> tuple[Run, list[str]]:
        seconds = SECONDS[server.name] / concurrency
        said = prompts if (server.name, concurrency) != ("theirs", 1) else [*prompts[:-1], "another"]
        return Run(server.name, concurrency, 0, 100, len(prompts), seconds, 20 if server.name == "ours" else None), said

    monkeypatch.setattr(serving, "measure", measure)


def rounds(ends_in_s: float) -> tuple[list[Run], dict[tuple[str, int], list[list[str]]]]:
    servers = [Server(name, "http://nowhere", "m") for name in SECONDS]
    asked = argparse.Namespace(repeats=3, max_tokens=8)
    return serving._rounds(servers, ["a", "b"], [1, 2], asked, time.monotonic() + ends_in_s)


def test_servers_take_turns_and_medians_are_told() -> None:
    runs, _ = rounds(60)
    assert [(run.repeat, run.concurrency, run.server) for run in runs[:5]] == [
        (0, 1, "ours"), (0, 1, "theirs"), (0, 2, "ours"), (0, 2, "theirs"), (1, 1, "ours"),
    ]  # fmt: skip
    assert len(runs) == 12
    ours, theirs = (serving._line(name, 2, runs, 2, 2) for name in SECONDS)
    assert (ours["tokens_per_s"], ours["tokens_per_pass"], ours["ours_over_it"]) == (100, 5, 1)
    assert (theirs["tokens_per_s"], theirs["tokens_per_pass"], theirs["ours_over_it"]) == (40, None, 2.5)


def test_no_round_begins_that_would_end_too_late() -> None:
    assert len(rounds(-1)[0]) == 4, "the first one always"


def test_answers_are_compared_at_each_concurrency_and_in_every_round() -> None:
    _, texts = rounds(60)
    assert {key: len(found) for key, found in texts.items()} == {(name, n): 3 for name in SECONDS for n in (1, 2)}
    expected = ["a", "b"]
    assert serving._identical(texts["theirs", 2], expected) == 2
    assert serving._identical(texts["theirs", 1], expected) == 1, "what the last concurrency says hides nothing"
    assert serving._identical([["a", "b"], ["a", "c"]], expected) == 1, "nor does the last round"
