"""Everything that lies in the runs folder plays, own models beside their own plain text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks import rivals
from tests.tiny_checkpoints import make_checkpoint
from vivace.decode.shallow import DraftPlan
from vivace.prompts import Prompt


@pytest.fixture
def given(tmp_path: Path) -> argparse.Namespace:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    make_checkpoint(tmp_path / "base", layers=4)
    rows = [Prompt(f"{a}{b}{a}", (f"{b}{a}{b}",)) for a in "abcdef" for b in "klmnop"]
    lines = [json.dumps({"prompt": row.request, "reference": row.references[0]}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    yield argparse.Namespace(
        model=str(tmp_path / "base"),
        runs=tmp_path / "runs",
        data=[tmp_path / "rows.jsonl"],
        kinds=["deed"],
        minutes=0.01,
        prompts=str(tmp_path / "rows.jsonl"),
        limit=2,
        tune_limit=1,
        max_new_tokens=6,
        repeats=1,
    )
    torch.set_num_threads(threads)


def test_what_was_trained_and_tuned_is_measured(given: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    training = rivals._training

    def small(*told: object) -> list[str]:
        return [*training(*told), "held_back=8", "adapter={gate: 2, bottleneck: 8}", "tokens_per_batch=128"]

    monkeypatch.setattr(rivals, "_training", small)
    monkeypatch.setattr(rivals, "candidates_of", lambda engine, method: [DraftPlan.chain(1), DraftPlan((2, 1))])
    rivals.train(given)
    tried = json.loads((given.runs / "tuning.json").read_text())
    assert {row["out"] for row in tried} == {"deed-0.001", "deed-0.003"}
    assert not (given.runs / "deed" / "run").exists()
    make_checkpoint(given.runs / "layerskip", seed=1, layers=4)
    report = rivals.measure(given)
    assert {row["method"] for row in report["runs"]} >= {
        *("plain", "lookup", "lookahead", "layerskip", "deed"),
        *("plain on the layerskip model", "layerskip on the layerskip model"),
    }
    assert all(row["identical"] for row in report["runs"])
    assert report["extra_bytes"]["deed"] > 0
    lines = rivals.table(report).splitlines()
    assert len(lines) == 2 + len(report["runs"])
    assert all("same" in line for line in lines[2:])
