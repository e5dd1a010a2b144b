"""``vivace tune runahead`` and ``bench parallel`` on two ranks: what is asked for is done, or refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import vivace.engine.opening as opening
from tests.parallel.ranks import run_ranks
from tests.tiny_checkpoints import make_checkpoint
from vivace.cli import runahead, tune
from vivace.cli.app import run
from vivace.cli.options import LoadFlags, ParallelFlags
from vivace.errors import UsageError

pytestmark = pytest.mark.multiprocess

RANKS = ParallelFlags(timeout=30.0)


def searched(folder: Path, lengths: str, load: LoadFlags) -> Any:
    """What rank 0 has written for people, or why it did not search."""
    said: list[str] = []
    runahead.TIMES = runahead.MOST = 1
    runahead.console.note = said.append  # type: ignore[method-assign] - of a process that ends with the test
    try:
        runahead.tune_runahead(str(folder), lengths, ["one two three"], load, RANKS, keep=True, as_json=False)
    except UsageError as error:
        return str(error)
    return said


def stored(folder: Path) -> Sequence[Any]:
    """The entries of the table beside a model."""
    entries: Sequence[Any] = json.loads((folder / "adapters/runahead-2/config.json").read_text())["config"]["entries"]
    return entries


def test_a_model_is_searched_without_its_recovery_adapter_where_that_is_asked_for(tmp_path: Path) -> None:
    """Ranks wear none, and the message says to give --no-recovery."""
    folder = make_checkpoint(tmp_path / "m", context=512)

    def work(recovery: bool) -> Any:
        opening.recovery_of = lambda base: base / "adapters" / "recovery"
        return searched(folder, "400", LoadFlags(kernels="torch", recovery=recovery))

    refused, _ = run_ranks(2, work, True)
    assert "give --no-recovery" in refused
    said, _ = run_ranks(2, work, False)
    assert "written to" in said[-1]
    assert [entry[0] for entry in stored(folder)] == [399]


def test_ways_are_compared_without_a_recovery_adapter_where_that_is_asked_for(tmp_path: Path) -> None:
    """Ranks wear none, and the message says to give --no-recovery, which this command has to have."""
    folder, report = make_checkpoint(tmp_path / "m", context=512), tmp_path / "report.json"

    def work(words: Sequence[str]) -> int:
        opening.recovery_of = lambda base: base / "adapters" / "recovery"
        asked = ["--lengths", "300", "--ways", "one", "--batches", "0", "--repeats", "1", "--json", str(report)]
        return run(["bench", "parallel", "--model", str(folder), "--kernels", "torch", *asked, *words])

    assert run_ranks(2, work, [])[0] == UsageError.exit_code
    assert not report.exists()
    assert run_ranks(2, work, ["--no-recovery"])[0] == 0
    assert [row["num_tokens"] for row in json.loads(report.read_text())["rows"]] == [300]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("tune runahead --kv int8 --weights q4 --adapter tiny", "leave out --adapter, --weights, --kv"),
        ("tune runahead --no-remember", "leave out --no-remember"),
        ("tune runahead --device cuda", "ranks compute on the CPU"),
        ("tune runahead --lengths ,", "--lengths has ','; write numbers from 1 on with commas"),
        ("tune runahead --lengths=", "--lengths has ''; write numbers from 1 on with commas, such as 512,2k"),
        ("tune runahead --lengths 4k,200", "prompts of up to 257 tokens are read by one rank"),
        ("bench parallel --lengths ,", "--lengths has ','"),
        ("bench parallel --batches 1,-2", "--batches has '-2'; write numbers from 0 on"),
        ("bench parallel --ways ,", "--ways names no way"),
    ],
)
def test_what_is_wrong_is_said_before_ranks_meet(
    words: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words.split()) == UsageError.exit_code
    assert complaint in capsys.readouterr().err


def test_as_many_prompts_are_taken_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Sequence[str]] = []
    monkeypatch.setattr(tune, "tune_runahead", lambda _, __, texts, *given, **named: taken.append(texts))
    assert run(["tune", "runahead", "--limit", "3"]) == 0
    assert [len(texts) for texts in taken] == [3]


def test_lengths_above_the_context_are_one_length_and_that_is_said(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", context=512)
    said, _ = run_ranks(2, searched, folder, "300,1k,2k", LoadFlags(kernels="torch"))
    assert [entry[0] for entry in stored(folder)] == [299, 503]
    assert said[0] == "1024, 2048: longer than the context leaves room for; 504 tokens in their place"
