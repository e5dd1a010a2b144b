"""A checkpoint is compared with transformers, and a difference would be seen."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import truth, truth_table
from tests.tiny_checkpoints import make_checkpoint


def test_a_checkpoint_says_what_it_says_in_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("There is a pub near the river, which serves cheap food. " * 8)
    sizes = {"limit": 3, "max_new_tokens": 8, "window": 16, "pieces": 2}
    found = truth.compare(model=str(folder), prompts="e2e", text=text, kernels="torch", **sizes)
    truth.print_findings(found)
    assert "float32: 3 of 3 greedy answers equal transformers'" in capsys.readouterr().out
    assert found["perplexity"]["ours"] == pytest.approx(found["perplexity"]["theirs"], rel=1e-5)
    assert found["perplexity"]["num_tokens"] == 30
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "one.json").write_text(json.dumps(found))
    written = truth_table.tables(tmp_path / "results")
    assert f"| `model` | 3 x 8 tokens | {found['longest_prompt']} tokens | 3 of 3 | - |" in written


def test_a_difference_is_shown_with_its_gap() -> None:
    class Model:
        def __call__(self, ids: torch.Tensor) -> object:
            assert ids.tolist() == [[1, 2, 7]]
            return type("Out", (), {"logits": torch.tensor([[[0.0, 1.0, 3.0, 2.5]]])})

    ours, theirs = [(7, 3), (5,), (4, 4)], [(7, 2), (5,), (4,)]
    first, second = truth.differences([[1, 2], [1], [1]], ours, theirs, Model())
    assert first == truth.Difference(prompt=0, place=1, ours=3, theirs=2, gap=0.5)
    assert second == truth.Difference(prompt=2, place=1, ours=4, theirs=None, gap=None)


def test_perplexity_of_a_known_distribution() -> None:
    logits = torch.tensor([0.25, 0.75]).log()
    found = truth.perplexity([[0, 1, 0]], lambda ids: logits.expand(len(ids), 2))
    assert found == pytest.approx(math.exp(-(math.log(0.75) + math.log(0.25)) / 2))
