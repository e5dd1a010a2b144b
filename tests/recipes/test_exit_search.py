"""The exit layer is searched for: each candidate learns for some steps, and the one that promises most goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import vivace
from tests.recipes.test_trainer import RECIPE, WORDS
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import load_adapter
from vivace.decode.shallow import DraftPlan
from vivace.errors import ConfigError
from vivace.recipes.exit_search import guess_cost, promised
from vivace.recipes.kinds import recipe_named, recipe_of
from vivace.recipes.reading import override
from vivace.recipes.trainer import train_beside
from vivace.train.report import Lines


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), layers=4)


def test_what_a_draft_promises() -> None:
    assert promised(1.0, 0.0, 3) == (4.0, 3)
    assert promised(0.0, 0.5, 3) == (1 / 1.5, 1)  # no guess is right: as few as there may be
    speed, length = promised(0.5, 0.1, 8)
    assert (speed, length) == (pytest.approx(1.75 / 1.2), 2)  # 1.5 / 1.1, 1.75 / 1.2, 1.875 / 1.3, ...


def test_what_a_guess_reads(checkpoint: Path) -> None:
    model = vivace.load(checkpoint, kernels="torch").model.config
    whole = DraftPlan.chain(3)
    assert guess_cost(model, model.num_layers, whole) == 1.0
    head = model.width * model.vocab_size
    layers = sum(part.numel() for part in vivace.load(checkpoint, kernels="torch").model.layers.parameters())
    norms = 2 * model.width * model.num_layers
    assert guess_cost(model, 2, whole) == pytest.approx(((layers - norms) / 2 + head) / (layers - norms + head))
    fewer, quantized = replace(whole, vocabulary=8), replace(whole, weights="q4")
    assert guess_cost(model, 2, fewer) < guess_cost(model, 2, whole)
    assert guess_cost(model, 2, quantized) == pytest.approx(0.265 * guess_cost(model, 2, whole))


def test_the_best_exit_is_trained_on_and_a_killed_run_finds_the_same(checkpoint: Path, tmp_path: Path) -> None:
    recipe, notes = replace(RECIPE, find_exit=(3, 1, 2, 2), find_steps=4), list[str]()
    train_beside(recipe, vivace.load(checkpoint, kernels="torch"), WORDS, tmp_path / "a", Lines(notes.append))
    tried = [note for note in notes if note.startswith("exit layer") and "a guess reads" in note]
    assert [note.split(":")[0] for note in tried] == ["exit layer 1", "exit layer 2", "exit layer 3"]
    speeds = {note.split(":")[0]: float(note.split("x with")[0].split()[-1]) for note in tried}
    (chosen,) = (note.removesuffix(" is trained on") for note in notes if note.endswith(" is trained on"))
    assert speeds[chosen] == max(speeds.values())
    config = load_adapter(tmp_path / "a")[0]["config"]
    assert f"exit layer {config['exit_layer']}" == chosen
    weights = (tmp_path / "a" / "adapter_model.safetensors").read_bytes()

    again = list[str]()  # as after a kill behind the last snapshot: nothing is tried anew, and the weights are the same
    train_beside(recipe, vivace.load(checkpoint, kernels="torch"), WORDS, tmp_path / "a", Lines(again.append))
    assert [note for note in again if "a guess reads" in note] == tried
    assert (tmp_path / "a" / "adapter_model.safetensors").read_bytes() == weights
    engine = vivace.load(checkpoint, adapters={"multirate": tmp_path / "a"})
    texts = [engine.generate("aka", method=m, max_new_tokens=16)[0].token_ids for m in ("plain", "multirate")]
    assert texts[0] == texts[1]


def test_exit_layers_that_cannot_be_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"find_exit names layers from 1 .* found \[0, 2\]"):
        recipe_of(override(recipe_named("multirate"), ["find_exit=[0,2]"]))
    with pytest.raises(ConfigError, match="find_steps is at least 1"):
        recipe_of(override(recipe_named("multirate"), ["find_steps=0"]))
    engine = vivace.load(checkpoint, kernels="torch")
    with pytest.raises(ConfigError, match="exit_layer 9 must lie below the top of a model of 4 layers"):
        train_beside(replace(RECIPE, find_exit=(2, 9)), engine, WORDS, tmp_path / "b", Lines(lambda text: None))
    assert not (tmp_path / "b").exists()
