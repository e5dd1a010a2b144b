"""``vivace evaluate --tasks`` and ``vivace data zeroshot`` on a real, tiny checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Outcome
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.load import load_config
from vivace.checkpoint.soft_prompt import save_soft_prompt
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.evaluate.zeroshot import TaskRow, save_task

CHOICES = [
    TaskRow("places", ("Describe: name[The Eagle]\nAnswer:",), (" The Eagle", " a cheap pub", " it is"), 1),
    TaskRow("places", ("Describe: food[Chinese], area[city centre]\nAnswer:",), (" Chinese food", " no"), 0),
    TaskRow("places", ("Which one",), (" is", " is it", " is it now"), 2),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("judged"))


def test_the_command_prints_a_table_and_refuses_flags_of_answers(
    cli: Callable[..., Outcome], folder: Path, tmp_path: Path
) -> None:
    save_task(tmp_path / "places.jsonl", CHOICES)
    words = ("evaluate", folder, folder, "--tasks", tmp_path / "places.jsonl", "--dtype", "float32")
    outcome = cli(*words)
    assert outcome.status == 0, outcome.err
    assert outcome.out.count("places") == 2
    found = cli(*words, "--limit", 2, "--json").json
    assert [one["num_rows"] for one in found["judgements"]] == [2, 2]
    assert found["judgements"][1]["kl"] == 0
    assert "--weights is about answers" in cli(*words, "--weights", "q4").err
    assert "compared by --tasks" in cli("evaluate", folder, folder).err
    assert "no file" in cli("evaluate", folder, "--tasks", tmp_path / "none.jsonl").err


def test_models_are_judged_without_and_behind_a_soft_prompt(
    cli: Callable[..., Outcome], folder: Path, tmp_path: Path
) -> None:
    save_task(tmp_path / "places.jsonl", CHOICES)
    width, drawn, tokenizer = load_config(folder).width, torch.Generator().manual_seed(0), load_tokenizer(folder)
    for name in ("one", "two"):
        save_soft_prompt(tmp_path / "pool" / name, torch.randn(5, width, generator=drawn), tokenizer, None)
    words = ("evaluate", folder, "--tasks", tmp_path / "places.jsonl", "--dtype", "float32", "--json")
    found = cli(*words, "--prompt-pool", tmp_path / "pool").json
    assert found["setting"]["models"] == [folder.name, f"{folder.name} + pool"]
    assert found["judgements"][1]["nll_change"]["estimate"] != 0
    one = cli(*words, "--prompt-pool", tmp_path / "pool", "--soft-prompt", "one").json
    assert one["setting"]["models"][1] == f"{folder.name} + pool one"
    assert "give the pool" in cli(*words, "--soft-prompt", "one").err
    assert "--tasks" in cli("evaluate", folder, "--prompt-pool", tmp_path / "pool").err


def test_public_files_are_written_and_what_has_no_options_is_said(cli: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "why.jsonl").write_text('{"query": "Question: Why?", "choices": ["a", "b"], "gold": 1}\n')
    (tmp_path / "in" / "sums.jsonl").write_text('{"context": "1 + 1 =", "answer": "2"}\n')
    outcome = cli("data", "zeroshot", tmp_path / "in", tmp_path / "out")
    assert (outcome.status, outcome.out.count("1 rows")) == (0, 1)
    assert "answered in words" in outcome.err
    assert not (tmp_path / "out" / "sums.jsonl").exists()
    assert "--split" in cli("data", "zeroshot", tmp_path / "in", tmp_path / "out", "--split", "dev").err
    assert "no *.txt or *.txt.gz" in cli("data", "wikitext", tmp_path / "in", tmp_path / "out").err
