"""Recipe in, working adapter out; killed runs go on; wrong bases are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import load_adapter
from vivace.decode.shallow import DraftPlan
from vivace.errors import ConfigError, MismatchError, NotFoundError
from vivace.multirate.config import MultirateConfig
from vivace.prompts import Prompt
from vivace.train.config import LoopConfig
from vivace.train.report import Lines
from vivace.training import AdapterRecipe, regenerated, train_adapter

WORDS = [Prompt(f"{a}{b}{a}", (f"{b}{a}{b}",)) for a in "abcdefgh" for b in "klmnopqr"]
RECIPE = AdapterRecipe(
    kind="multirate",
    loop=LoopConfig(steps=8, warmup_steps=2, report_steps=4),
    adapter=MultirateConfig(gate=2, rank=4, bottleneck=8),
    plan=DraftPlan.chain(3),
    tokens_per_batch=128,
    held_back=8,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_checkpoint(tmp_path_factory.mktemp("base"), layers=4)
    torch.set_num_threads(threads)


def test_a_trained_adapter_decodes_the_same_text(checkpoint: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    runs = train_adapter(RECIPE, vivace.load(checkpoint), WORDS, tmp_path / "fast", Lines(notes.append))
    assert [run.method for run in runs] == ["plain", "multirate"]
    assert all(run.identical for run in runs)
    assert runs[1].acceptance_per_position
    assert any("memory: about" in note for note in notes)
    engine = vivace.load(checkpoint, adapters={"multirate": tmp_path / "fast"})
    plain, fast = (engine.generate("aka", method=m, max_new_tokens=24)[0] for m in ("plain", "multirate"))
    assert plain.token_ids == fast.token_ids
    assert fast.stats.num_draft_tokens > 0
    found, _ = load_adapter(tmp_path / "fast")
    assert (found["kind"], found["plan"]["widths"]) == ("multirate", [1, 1, 1])


def test_an_adapter_of_another_base_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    train_adapter(RECIPE, vivace.load(checkpoint), WORDS, tmp_path / "fast", Lines(lambda _: None))
    other = make_checkpoint(tmp_path / "other", seed=1, layers=4)
    with pytest.raises(MismatchError, match="was trained on base"):
        vivace.load(other, adapters={"multirate": tmp_path / "fast"}).generate("aka", method="multirate")
    with pytest.raises(NotFoundError, match="vivace train multirate --model"):
        vivace.load(other).generate("aka", method="multirate")


def test_a_finished_run_is_not_trained_again(checkpoint: Path, tmp_path: Path) -> None:
    out, notes = tmp_path / "fast", list[str]()
    train_adapter(RECIPE, vivace.load(checkpoint), WORDS, out, Lines(lambda _: None))
    first = (out / "adapter_model.safetensors").read_bytes()
    train_adapter(RECIPE, vivace.load(checkpoint), WORDS, out, Lines(notes.append))
    assert (out / "adapter_model.safetensors").read_bytes() == first
    assert any("resumed after step 8" in note for note in notes)


def test_regenerated_answers_go_on_after_a_cut(checkpoint: Path, tmp_path: Path) -> None:
    engine = vivace.load(checkpoint)
    prompts = [str(row.request) for row in WORDS] + ["extra one", "extra two"]
    whole = regenerated(engine, prompts, tmp_path / "a.jsonl", lambda _: None)
    text = (tmp_path / "a.jsonl").read_text()
    lines = text.splitlines(keepends=True)
    (tmp_path / "b.jsonl").write_text("".join(lines[:5]) + lines[5][:9])
    assert regenerated(engine, prompts, tmp_path / "b.jsonl", lambda _: None) == whole
    assert (tmp_path / "b.jsonl").read_text() == text
    assert len([json.loads(line) for line in lines]) == len(prompts)


def test_too_few_rows_are_an_error(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="8 rows leave nothing to train on"):
        train_adapter(RECIPE, vivace.load(checkpoint), WORDS[:8], tmp_path / "x", Lines(lambda _: None))
