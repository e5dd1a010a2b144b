"""Chat by category: who answers, what ``auto`` remembers, and that a run leaves no measurements behind."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import chat_drafts
from vivace.engine import Engine
from vivace.engine.opening import SHIPPED
from vivace.prompts import Prompt, save_prompts


def test_auto_has_a_run_behind_it_where_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Prompt(f"name[Green Man], food[{food}]", (), task) for task in ("code", "summaries") for food in ("a", "b")]
    save_prompts(tmp_path / "asked.jsonl", rows)
    save_prompts(tmp_path / "before.jsonl", rows[:1])
    out, kept = tmp_path / "out.json", str(tmp_path / "of the user")
    monkeypatch.setenv("VIVACE_CACHE_DIR", kept)
    call = ["chat_drafts", "run", str(SHIPPED), str(tmp_path / "asked.jsonl"), "--json", str(out)]
    call += ["--methods", "plain,lookup,auto", "--temperatures", "0", "--limit", "1", "--tokens", "6"]
    monkeypatch.setattr(sys, "argv", [*call, "--earlier", str(tmp_path / "before.jsonl")])
    chat_drafts.main()
    written = json.loads(out.read_text())
    assert written["remembered"]
    assert [part["category"] for part in written["report"]] == ["code", "summaries"]
    for part in written["report"]:
        assert [run["method"] for run in part["runs"]] == ["plain", "lookup", "auto"]
        assert all(run["num_different"] == 0 for run in part["runs"])
    assert os.environ["VIVACE_CACHE_DIR"] == kept
    assert not Path(kept).exists()


def test_the_engine_that_is_measured_reads_what_the_one_before_has_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_prompts(tmp_path / "before.jsonl", [Prompt("x")])
    monkeypatch.delenv("VIVACE_CACHE_DIR", raising=False)
    folders: list[tuple[bool, str]] = []

    def load(remember: bool) -> Engine:
        folders.append((remember, os.environ["VIVACE_CACHE_DIR"]))
        return object.__new__(Engine)

    answered: list[Engine] = []

    def answer(engine: Engine, rows: Sequence[Prompt]) -> None:
        assert rows == [Prompt("x")]
        answered.append(engine)

    with chat_drafts.with_a_run_behind(load, tmp_path / "before.jsonl", answer) as engine:
        assert len(answered) == 1
        assert answered[0] is not engine
    (first, behind), (then, own) = folders
    assert (first, then, behind) == (True, True, own)
    assert not Path(own).exists()
    assert "VIVACE_CACHE_DIR" not in os.environ
    with chat_drafts.with_a_run_behind(load, None, answer):
        assert not folders[-1][0]
