"""The experiment with a pool of soft prompts: what choosing gives follows from the rows behind members."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.prompt_pool import interval, main, tables
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.soft_prompt import save_soft_prompt
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.evaluate.zeroshot import TaskRow, save_task


def test_a_difference_in_every_row_has_no_width_and_tasks_count_alike() -> None:
    other = {"many": np.zeros(90), "few": np.zeros(10)}
    assert interval({"many": np.ones(90), "few": np.ones(10)}, other) == {"mean": 1.0, "low": 1.0, "high": 1.0}
    found = interval({"many": np.zeros(90), "few": np.ones(10)}, other)
    assert found["mean"] == pytest.approx(0.5)
    halves = {"many": np.arange(90) % 2.0, "few": np.zeros(10)}
    spread = interval(halves, other)
    assert spread["low"] < 0.25 < spread["high"]
    assert spread["mean"] == pytest.approx(0.25)


def test_the_best_for_each_row_is_never_behind_a_member_and_the_chosen_one_is_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, rounded = make_checkpoint(tmp_path / "stored"), make_checkpoint(tmp_path / "rounded", seed=1)
    torch.manual_seed(0)
    for name, count in (("2-0", 2), ("5-0", 5)):
        save_soft_prompt(tmp_path / "pool" / name, torch.randn(count, 32), load_tokenizer(stored), "base")
    words = [f"{a}{b} is {b}" for a in "abcde" for b in "vwxy"]
    save_task(tmp_path / "one.jsonl", [TaskRow("one", (word,), (" the", " cat sat"), len(word) % 2) for word in words])
    save_task(tmp_path / "two.jsonl", [TaskRow("two", (word, word + " and"), (" a",), 1) for word in words])
    asked = ["prompt_pool", str(rounded), str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl")]
    asked += ["--stored", str(stored), "--pool", str(tmp_path / "pool"), "--json", str(tmp_path / "out" / "found.json")]
    monkeypatch.setattr("sys.argv", asked)
    main()
    found = json.loads((tmp_path / "out" / "found.json").read_text())["prompt_pool"]
    systems, members = found["systems"], [*found["members"]]
    assert members == ["2-0", "5-0"]
    assert sum(found["choices"]["chosen"].values()) == len(words) * 2
    for task in ("one", "two"):
        rights = [systems[name]["by_task"][task] for name in members]
        assert systems["best for each row"]["by_task"][task] >= max(rights)
        assert systems["drawn"]["by_task"][task] == pytest.approx(sum(rights) / 2)
    assert systems["best for each row"]["nats"] <= min(systems[name]["nats"] for name in members)
    assert systems["best for each row"]["nats"] <= systems["chosen"]["nats"]
    assert systems["rounded"]["against_rounded"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    written = tables(tmp_path / "out")
    assert all(f"| {name} |" in written for name in (*members, "chosen", "drawn", "best for each row", "stored"))
