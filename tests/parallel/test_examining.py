"""Links are examined pair by pair; ``vivace doctor`` under torchrun shows them."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest

import vivace.parallel.world as worlds
from tests.parallel.ranks import Ended, run_ranks
from vivace.cli.app import run
from vivace.errors import WorldError
from vivace.parallel.examining import LARGE, examine

COUNT = 3


def looked() -> Any:
    world = worlds.join(timeout_s=20.0)
    machines, links = examine(world, {"name": f"machine {world.rank}"})
    sent = world.traffic
    if world.leads:
        world.close()
    return machines, links, sent


def test_every_pair_is_measured_and_only_rank_0_has_the_answer() -> None:
    (machines, links, sent), *others = run_ranks(COUNT, looked)
    assert machines == [{"name": f"machine {rank}"} for rank in range(COUNT)]
    assert [(link.first, link.second) for link in links] == [(0, 1), (0, 2), (1, 2)]
    assert all(0 < link.latency_s < 0.05 for link in links)
    assert all(link.bytes_per_s > 1e6 for link in links)
    for found, none, _ in others:
        assert (found, none) == ([], [])
    assert sent["1"]["examining"]["bytes"] > 3 * LARGE  # rank 0 measures its own links
    assert others[0][2]["2"]["examining"]["bytes"] > 3 * LARGE  # and rank 1 the one to rank 2


def doctored() -> Any:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = run(["doctor", "--json", "--timeout", "20"])
    return status, out.getvalue()


def test_doctor_shows_ranks_and_links() -> None:
    (status, out), (other, nothing) = run_ranks(2, doctored, limit_s=120.0)
    assert (status, other, nothing) == (0, 0, "")
    findings = {finding["subject"]: finding for finding in json.loads(out)["findings"]}
    assert findings["rank 0"]["works"]
    assert findings["rank 1"]["detail"] == findings["rank 0"]["detail"]
    assert "Mbit/s" in findings["link 0 to 1"]["detail"]
    assert findings["answer"]["works"]  # the model is examined by rank 0 alone


def lost() -> Any:
    world = worlds.join(timeout_s=5.0)
    if world.rank == 1:
        raise SystemExit(3)
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            examine(world, {})
        except WorldError as error:
            return str(error)
    return None


def test_a_rank_that_ends_is_named() -> None:
    told, ended = run_ranks(2, lost)
    assert isinstance(ended, Ended)
    assert "rank 1" in told


def test_links_without_ranks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--link-interface", "lo"]) == 2
    assert "links are between ranks, which torchrun starts" in " ".join(capsys.readouterr().err.split())
