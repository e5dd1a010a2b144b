"""What a training would need: the same figures with weights and without, those that a training then shows, no file."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import vivace
from tests.recipes.test_trainer import RECIPE, WORDS
from tests.tiny_checkpoints import make_checkpoint
from vivace.cli.app import run
from vivace.errors import NotFoundError, UnsupportedError
from vivace.prompts import save_prompts
from vivace.recipes import own_text
from vivace.recipes.dry_run import TextToLearn, dry_run, is_loadable, without_weights
from vivace.recipes.frozen import FrozenRecipe
from vivace.recipes.kinds import recipe_named, recipe_of
from vivace.recipes.reading import override
from vivace.recipes.trainer import train_beside
from vivace.train.report import Lines

CPU = torch.device("cpu")
VALUES = {key: value for key, value in asdict(replace(RECIPE, longest=64)).items() if key != "own_tokens"}
OWN = TextToLearn(0, is_answered=False)
SMALL = (
    "loop.minutes=null",
    "loop.steps=6",
    "loop.warmup_steps=1",
    "tokens_per_batch=128",
    "longest=64",
    "held_back=4",
)
KINDS = {
    "multirate": ("adapter.exit_layer=2", "find_reach=2", "plan.vocabulary=64"),
    "chat": ("adapter.exit_layer=1", "own_tokens=900"),
    "deed": ("adapter.exit_layer=2",),
    "eagle": (),
    "medusa": (),
    "uno": (),
    "multistream": ("adapter.insertion_layer=2",),
    "lora": (),
    "draft": ("layers=[0,3]",),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), layers=4)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_text, "ON_CPU", own_text.Together(8))


def recipe_for(kind: str, *changes: str) -> FrozenRecipe:
    found = recipe_of(override(recipe_named(kind), [*SMALL, *KINDS.get(kind, ()), *changes]))
    assert isinstance(found, FrozenRecipe)
    return found


def only_config(checkpoint: Path, folder: Path) -> Path:
    folder.mkdir()
    shutil.copyfile(checkpoint / "config.json", folder / "config.json")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_memory_and_files_are_the_same_without_weights(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    folder, recipe = only_config(checkpoint, tmp_path / "config"), recipe_for(kind)
    assert is_loadable(checkpoint, CPU)
    assert not is_loadable(folder, CPU)
    loaded = vivace.load(checkpoint, kernels="torch", dtype="bfloat16")
    before = {name: part.clone() for name, part in loaded.model.named_parameters()}
    seen = dry_run(recipe, loaded, OWN, CPU)
    assert all(torch.equal(part, before[name]) for name, part in loaded.model.named_parameters())
    imagined = dry_run(recipe, without_weights(folder, "bfloat16", "auto"), OWN, CPU)
    assert imagined.memory == seen.memory is not None
    assert imagined.files == seen.files
    assert imagined.figures["weights of the model"].value == seen.figures["weights of the model"].value
    assert (seen.figures["a step"].how, imagined.figures["a step"].how) == ("measured", "computed")
    assert imagined.figures["products of matrices here"].how == "measured"
    assert min(found.figures["a step"].value for found in (seen, imagined)) > 0
    if recipe.own_tokens:
        assert [found.figures["writing it"].how for found in (seen, imagined)] == ["measured", "computed"]
        assert all(found.figures["writing it"].value > 0 for found in (seen, imagined))


def test_a_training_needs_what_was_said(checkpoint: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    recipe = replace(RECIPE, adapter=replace(RECIPE.adapter, bottleneck=512))
    said = dry_run(recipe, vivace.load(checkpoint, kernels="torch"), TextToLearn(len(WORDS), is_answered=True), CPU)
    out = tmp_path / "fast"
    train_beside(recipe, vivace.load(checkpoint, kernels="torch"), WORDS, out, Lines(notes.append), is_timed=False)
    assert f"memory: {said.memory}" in notes
    assert said.figures["steps"].value == RECIPE.loop.steps
    assert said.files.keys() == {"weights", "run/state.pt", "run/best.pt", "draft_vocabulary.safetensors"}
    for name, size in said.files.items():
        path = out / ("adapter_model.safetensors" if name == "weights" else name)
        assert size < path.stat().st_size < size + 2**15  # names, shapes and progress beside the numbers
    assert said.figures["rows"].value == len(WORDS)


def test_minutes_are_of_the_budget(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = vivace.load(checkpoint, kernels="torch")
    budget = replace(RECIPE.loop, steps=None, minutes=3.0, snapshot_s=0.0)
    recipe = replace(RECIPE, loop=budget, own_tokens=10**9, own_minutes=2.0, longest=64)
    found = dry_run(recipe, engine, OWN, CPU).figures
    assert (found["minutes of writing"].value, found["minutes of training"].value) == (2.0, 3.0)
    assert found["minutes in all"].value == 5.0
    assert found["steps"].value == int(180 / found["a step"].value)
    share = 1 + 24 / ((64 - 24) / 4)  # of drawing: three quarters of the longest prompt beside a quarter of the rest
    assert found["text to write"].value == pytest.approx(120 * found["writing it"].value / share, rel=0.01)
    few = dry_run(replace(recipe, own_tokens=30, own_minutes=None), engine, OWN, CPU)
    assert any("leave nothing to train on with 8 held back" in note for note in few.notes)
    assert not list(tmp_path.iterdir())
    short = replace(recipe, loop=replace(budget, minutes=1e-9))
    assert any("before a second step" in note for note in dry_run(short, engine, OWN, CPU).notes)


def test_what_has_no_steps_and_what_has_many_trainings(checkpoint: Path, tmp_path: Path) -> None:
    engine = without_weights(only_config(checkpoint, tmp_path / "config"), "bfloat16", "auto")
    found = dry_run(recipe_for("quantized"), engine, OWN, CPU)
    assert found.memory is None
    assert list(found.files) == ["run/own.jsonl"]
    assert any("no weights are trained" in note for note in found.notes)
    assert found.figures["memory at the most"].value > found.figures["memory: writing text, beside weights"].value
    one, four = (
        dry_run(
            recipe_for("prompts", f"seeds={seeds}", "lengths=[3,5]"), engine, TextToLearn(99, is_answered=True), CPU
        )
        for seeds in ("[0]", "[0,1]")
    )
    assert any("4 trainings" in note for note in four.notes)
    assert any("2 trainings" in note for note in one.notes)
    assert four.figures["minutes in all"].value > 3 * four.figures["minutes of training"].value


def test_what_cannot_be_trained_is_said_at_once(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        without_weights(tmp_path, "auto", "auto")
    with pytest.raises(UnsupportedError, match="finds no CUDA device"):
        without_weights(only_config(checkpoint, tmp_path / "config"), "auto", "cuda")


def test_the_command_writes_nothing(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = only_config(checkpoint, tmp_path / "config"), tmp_path / "out"
    (tmp_path / "recipe.json").write_text(json.dumps(VALUES), encoding="utf-8")
    save_prompts(tmp_path / "rows.jsonl", WORDS)
    before = sorted(tmp_path.rglob("*"))
    words = ["train", str(tmp_path / "recipe.json"), "--dry-run", "--out", str(out), "--model"]
    assert run([*words, str(checkpoint), "--data", str(tmp_path / "rows.jsonl"), "--json"]) == 0
    given = json.loads(capsys.readouterr().out)
    assert given["fits"] is True
    assert given["figures"]["a step"]["how"] == "measured"
    assert "text to write" not in given["figures"]
    assert run([*words, str(folder)]) == 0
    shown = capsys.readouterr()
    assert "computed from its config.json" in shown.err
    assert "would write" in shown.out
    assert "text to write" in shown.out
    few = ["own_tokens=0", *words[2:]]
    assert run([*words[:2], *few, str(checkpoint)]) == 2
    assert "none of 0 rows" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
