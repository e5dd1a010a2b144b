"""Calibrating sums over ranks, and comparing their forms on simulated ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny_checkpoints import make_checkpoint
from vivace.cli.app import run


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
    for flags, told in (
        (["--ranks", "2"], "give --simulate"),
        (["--ranks", "two", "--simulate"], "--wire needs forms, numbers of ranks and a text"),
        (["--ranks", "4", "--simulate"], "vivace train lowbit ranks=4"),
        (["--ranks", "99", "--simulate"], "simulated ranks are 2 to 16, found 99"),
    ):
        assert run([*asked, *flags]) != 0
        assert told in capsys.readouterr().err
    assert run(["evaluate", str(model), "--simulate"]) != 0
    assert "no effect without --wire" in capsys.readouterr().err
