"""Calibrating sums over ranks, and comparing their forms on simulated ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny_checkpoints import make_checkpoint
from vivace.cli.app import run
from vivace.cli.evaluate_wires import is_above_chance
from vivace.evaluate.judging import Judgement
from vivace.evaluate.zeroshot import TaskRow, save_task


@pytest.fixture
def threads() -> Iterator[None]:
    """Ranks in this process set PyTorch's threads to one."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_a_calibration_is_made_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, rows = make_checkpoint(tmp_path / "model"), tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"name {n}", "reference": f"The {n} eats."}) + "\n" for n in range(9))
    )
    text = tmp_path / "text.txt"
    text.write_text("The Eagle is a coffee shop near the river. " * 60)
    assert run(["train", "lowbit", "ranks=2", "--model", str(model), "--data", str(rows)]) == 0
    assert json.loads((model / "adapters" / "lowbit-2" / "config.json").read_text())["config"]["num_ranks"] == 2
    asked = ["evaluate", str(model), "--wire", "same,lowbit,paper", "--text", str(text), "--windows", "2"]
    capsys.readouterr()
    assert run([*asked, "--ranks", "2", "--simulate", "--json"]) == 0
    alone, same, lowbit, paper = json.loads(capsys.readouterr().out)["wires"]
    assert same["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-5)
    assert lowbit["perplexity"] == pytest.approx(alone["perplexity"], rel=0.1)
    assert lowbit["perplexity"] != alone["perplexity"] != paper["perplexity"]
    assert lowbit["bits"] == 4.25, "of 32 features none is kept, and each row has a byte"
    save_task(tmp_path / "places.jsonl", [TaskRow("places", ("Which one",), (" is", " was it", " it"), 1)] * 3)
    judged = ["evaluate", str(model), "--wire", "same,lowbit", "--tasks", str(tmp_path / "places.jsonl")]
    assert run([*judged, "--ranks", "2", "--simulate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["wire"], one["ranks"]) for one in found["wires"]] == [("one process", 1), ("same", 2), ("lowbit", 2)]
    assert found["setting"]["chance"] == {"places": pytest.approx(1 / 3)}
    _, same, lowbit = (one["judgements"][0] for one in found["wires"])
    assert abs(same["kl"]) < 1e-6 < lowbit["kl"]
    for flags, told in (
        (["--ranks", "2", "--simulate", "--tasks", "none.jsonl"], "leave out one of them"),
        (["--ranks", "2"], "give --simulate"),
        (["--ranks", "two", "--simulate"], "--ranks has 'two'; write numbers from 2 on"),
        (["--simulate"], "--wire needs forms, numbers of ranks and a text"),
        (["--ranks", "4", "--simulate"], "vivace train lowbit ranks=4"),
        (["--ranks", "99", "--simulate"], "simulated ranks are 2 to 16, found 99"),
    ):
        assert run([*asked, *flags]) != 0
        assert told in capsys.readouterr().err
    assert run(["evaluate", str(model), "--simulate"]) != 0
    assert "no effect without --wire" in capsys.readouterr().err


def test_a_task_counts_where_its_score_is_above_chance_by_more_than_luck() -> None:
    def scored(share: float | None, rows: int) -> Judgement:
        return Judgement("t", "s", rows, share, share, 1.0, 2.7, None, None, None, None, None)

    assert is_above_chance(scored(0.6, 1000), 0.5)
    assert not is_above_chance(scored(0.6, 20), 0.5)
    assert not is_above_chance(scored(None, 1000), 0.0)
