"""Answers that another training had written: learnt from as they are, and a resumed run must find the same."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import vivace
from tests.recipes.test_trainer import RECIPE, WORDS
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import base_hash, load_adapter
from vivace.cli.app import run
from vivace.engine import Engine
from vivace.errors import ConfigError, MismatchError
from vivace.recipes.answers import read_answers, without_writing
from vivace.recipes.frozen import TrainContext
from vivace.recipes.trainer import train_beside
from vivace.train.data import Unended
from vivace.train.report import Lines

QUIET = Lines(lambda _: None)
ANSWERED = replace(RECIPE, longest=24)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), layers=4)


@pytest.fixture
def engine(checkpoint: Path) -> Engine:
    return vivace.load(checkpoint, kernels="torch")


def write(path: Path, checkpoint: Path, count: int = 40) -> Path:
    """Write answers of which every third was cut, and the beginning of one more, which ends within a character."""
    lines = []
    for number, row in enumerate(WORDS[:count]):
        known = {"model": base_hash(checkpoint)[:16], "tokens": 3, "draw": number, "ended": number % 3 > 0}
        lines.append(json.dumps({"prompt": row.request, "reference": row.references[0], **known, "elapsed_s": 1.0}))
    path.write_bytes("\n".join([*lines, '{"prompt": "cut ö']).encode()[:-1])
    return path


def test_a_file_is_read_as_it_is_and_not_changed(checkpoint: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", checkpoint)
    before = path.read_bytes()
    found = read_answers(path, base_hash(checkpoint))
    assert path.read_bytes() == before
    assert found.pairs == tuple((str(row.request), row.references[0]) for row in WORDS[:40])
    assert [isinstance(answer, Unended) for _, answer in found.pairs] == [number % 3 == 0 for number in range(40)]
    assert found.num_tokens == 120
    assert found.part(1, 3).pairs == found.pairs[1::3]
    other = write(tmp_path / "fewer.jsonl", checkpoint, 39)
    assert read_answers(other, base_hash(checkpoint)).digest != found.digest


def test_all_rows_are_the_files_and_none_is_written(checkpoint: Path, engine: Engine, tmp_path: Path) -> None:
    answers, notes = read_answers(write(tmp_path / "own.jsonl", checkpoint), base_hash(checkpoint)), list[str]()
    out = tmp_path / "fast"
    context = TrainContext.of(ANSWERED, engine, [], out, Lines(notes.append), answers)
    assert sorted([*context.train, *context.held_back]) == sorted(answers.pairs)
    assert any("40 answers of" in note and "none is written" in note for note in notes)
    ends = {row.tokens[-1] in engine.tokenizer.eos_ids for row in context.rows(answers.pairs[:2])}
    assert ends == {True, False}  # the first answer was cut: no end is learnt behind it
    long = [("a", "b" * 90)]
    assert [len(row.tokens) for row in context.rows(long)] == [ANSWERED.longest]  # cut as an own text is
    train_beside(ANSWERED, engine, [], out, Lines(notes.append), answers=answers)
    assert load_adapter(out)[0]["kind"] == "multirate"
    assert not (out / "run" / "own.jsonl").exists()
    texts = [
        vivace.load(checkpoint, adapters={"multirate": out}).generate("aka", method=m) for m in ("plain", "multirate")
    ]
    assert texts[0][0].token_ids == texts[1][0].token_ids


def test_a_killed_run_goes_on_with_the_same_rows_only(checkpoint: Path, engine: Engine, tmp_path: Path) -> None:
    path, base, out, notes = tmp_path / "own.jsonl", base_hash(checkpoint), tmp_path / "fast", list[str]()
    answers = read_answers(write(path, checkpoint), base)
    train_beside(ANSWERED, engine, [], out, QUIET, answers=answers, is_timed=False)
    first = (out / "adapter_model.safetensors").read_bytes()
    copied = read_answers(write(tmp_path / "copied.jsonl", checkpoint), base)
    train_beside(ANSWERED, engine, [], out, Lines(notes.append), answers=copied, is_timed=False)
    assert any("resumed after step 8" in note for note in notes)
    assert (out / "adapter_model.safetensors").read_bytes() == first
    # as many rows, one of them another
    path.write_bytes(path.read_bytes().replace(WORDS[0].references[0].encode(), b"other"))
    with pytest.raises(MismatchError, match="another recipe, base or data"):
        train_beside(ANSWERED, engine, [], out, QUIET, answers=read_answers(path, base), is_timed=False)
    with pytest.raises(MismatchError, match=r"began with other text .* --answers as then"):
        train_beside(replace(ANSWERED, own_tokens=900), engine, [], out, QUIET)
    assert not (out / "run" / "own.jsonl").exists()


def test_the_command_takes_a_file_for_a_recipe_that_would_write(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, out = write(tmp_path / "own.jsonl", checkpoint), tmp_path / "fast"
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(asdict(replace(ANSWERED, own_tokens=10**6, own_minutes=9))), encoding="utf-8")
    assert run(["train", str(recipe), "--model", str(checkpoint), "--out", str(out), "--answers", str(answers)]) == 0
    assert "40 answers of" in " ".join(capsys.readouterr().err.split())
    assert load_adapter(out)[0]["kind"] == "multirate"
    assert [path.name for path in (out / "run").iterdir() if path.suffix == ".jsonl"] == []


def test_the_plan_of_a_run_without_a_file_has_a_digest_of_its_data(
    checkpoint: Path, engine: Engine, tmp_path: Path
) -> None:
    context = TrainContext.of(RECIPE, engine, WORDS, tmp_path / "fast", QUIET)
    found = json.loads(context.plan_text("base"))
    assert set(found) == {"recipe", "base", "rows", "data"}  # runs of earlier versions, without data, go on


def test_other_text_beside_answers_is_refused(checkpoint: Path, engine: Engine, tmp_path: Path) -> None:
    answers = read_answers(write(tmp_path / "own.jsonl", checkpoint), base_hash(checkpoint))
    for recipe, prompts in (
        (ANSWERED, WORDS),
        (replace(ANSWERED, own_tokens=9), []),
        (replace(ANSWERED, regenerate=9), []),
    ):
        with pytest.raises(ConfigError, match="leave out prompts, own_tokens and regenerate"):
            train_beside(recipe, engine, prompts, tmp_path / "fast", QUIET, answers=answers)
    values = {"kind": "multirate", "own_tokens": 5, "own_minutes": 1, "regenerate": 3, "longest": 24}
    assert without_writing(values, ["longest=24"], has_data=False) == {"kind": "multirate", "longest": 24}
    for change in ("own_tokens=0", "own_minutes=3", "regenerate=3"):
        with pytest.raises(ConfigError, match=f"leave out {change.partition('=')[0]}, or --answers"):
            without_writing(values, [change], has_data=False)
