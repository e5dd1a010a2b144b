"""``vivace train recover``: a LoRA on a checkpoint in few bits, trained to be the stored model, and worn by default."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vivace
from tests.adapters.loras import make_lora
from tests.tiny_checkpoints import make_checkpoint
from vivace.adapters.lora import recovery_of
from vivace.adapters.training import LoraWeights
from vivace.checkpoint.adapters import base_hash
from vivace.cli.app import run
from vivace.core.low_rank import PROJECTIONS, site_shapes
from vivace.core.step import Step
from vivace.engine import Engine
from vivace.errors import ConfigError, MismatchError
from vivace.evaluate.likelihood import log_likelihoods
from vivace.prompts import Prompt, save_prompts
from vivace.recipes.kinds import recipe_named, recipe_of
from vivace.recipes.recover import RecoverRecipe
from vivace.recipes.trainer import train_beside
from vivace.train.config import LoopConfig
from vivace.train.distillation import divergence
from vivace.train.optim import OptimiserConfig
from vivace.train.report import Lines

RECIPE = RecoverRecipe(
    loop=LoopConfig(steps=40, warmup_steps=2, report_steps=20, evaluate_steps=20),
    optimiser=OptimiserConfig(adamw_rate=0.01),
    rank=4,
    tokens_per_batch=256,
    held_back=8,
)
TEXT = re.findall(r"\w+", "the cat sat on a mat and the dog ate what was left of it by the river")
ROWS = [Prompt(" ".join(TEXT[at % 9 :]), (" ".join(TEXT[(at * 5) % 11 :]),)) for at in range(64)]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def rounded(stored: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rounded")
    save_prompts(place / "rows.jsonl", ROWS)
    words = ["compress", place / "out", "--model", stored, "--bits", "2", "--data", place / "rows.jsonl", "--quiet"]
    assert run([*map(str, words), "--tokens", "512"]) == 0
    return place / "out"


@pytest.fixture(scope="module")
def recovered(stored: Path, rounded: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A copy of the checkpoint with its adapter, and what was said while it learnt."""
    folder = tmp_path_factory.mktemp("recovered") / "out"
    shutil.copytree(rounded, folder)
    notes: list[str] = []
    torch.manual_seed(0)
    recipe = replace(RECIPE, stored=str(stored))
    engine = vivace.load(folder, kernels="torch", recovery=False)
    assert train_beside(recipe, engine, ROWS, folder / "adapters" / "recovery", Lines(notes.append)) == []
    return folder, notes


def away(engine: Engine, stored: Path) -> float:
    """Mean divergence from the stored model over some text."""
    truth = vivace.load(stored, dtype="float32")
    total, count = 0.0, 0
    for row in ROWS[:12]:
        ids = truth.tokenizer.encode(f"{row.request} {row.references[0]}", special=False)
        total += float(divergence(engine.logits([ids])[0], truth.logits([ids])[0]))
        count += len(ids)
    return total / count


def test_it_is_worn_by_default_and_comes_nearer_to_the_stored_model(
    recovered: tuple[Path, list[str]], stored: Path
) -> None:
    folder, notes = recovered
    worn, bare = (vivace.load(folder, dtype="float32", recovery=each) for each in (True, False))
    assert away(worn, stored) < 0.8 * away(bare, stored)
    assert any("worn by default: adapters/recovery" in note for note in worn.notes)
    assert not any("worn by default" in note for note in bare.notes)
    (said,) = [note for note in notes if "nats a token from the stored model" in note]
    after, before = re.findall(r": ([\d.]+) nats.*?, ([\d.]+) without;", said)[0]
    assert float(after) < float(before)
    config = json.loads((folder / "adapters" / "recovery" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["peft_type"], config["r"]) == ("LORA", 4)


def test_everything_that_reads_with_the_model_wears_it(recovered: tuple[Path, list[str]]) -> None:
    folder, _ = recovered
    worn = vivace.load(folder)
    named = vivace.load(folder, recovery=False, adapters={"mine": folder / "adapters" / "recovery"})
    for method in ("plain", "lookup"):
        answers = [
            engine.generate("the cat", method=method, max_new_tokens=24, do_sample=False, adapter=name)[0].token_ids
            for engine, name in ((worn, None), (named, "mine"), (named, None))
        ]
        assert answers[0] == answers[1] != answers[2]
    rows = [("the cat", (" sat", " on a mat"))]
    assert log_likelihoods(worn, rows) == log_likelihoods(named, rows, adapter="mine") != log_likelihoods(named, rows)


def test_factors_that_add_nothing_leave_the_bits(rounded: Path) -> None:
    model = vivace.load(rounded, kernels="torch").model
    weights = LoraWeights(site_shapes(model.config, range(model.config.num_layers), dict.fromkeys(PROJECTIONS, 8)))
    ids = torch.arange(5, 25)
    step = Step.dense(1, len(ids))
    worn = replace(step, deltas=(weights.to(model.dtype).deltas(torch.zeros_like(step.slot)),))
    plain, other = (model.run(model.embed(ids, each), each) for each in (step, worn))
    assert torch.equal(plain, other)


def test_it_belongs_to_one_rounding(
    recovered: tuple[Path, list[str]], rounded: Path, stored: Path, tmp_path: Path
) -> None:
    """An adapter of the model before rounding is refused, as is one of another rounding or of nobody knows what."""
    folder, _ = recovered
    assert base_hash(folder) == base_hash(rounded) != base_hash(stored)
    for name, adapter in {
        "of the stored model": make_lora(tmp_path / "stored-lora", stored),
        "of nobody": make_lora(tmp_path / "lora", rounded, says_base=False),
    }.items():
        copy = tmp_path / name
        shutil.copytree(rounded, copy)
        shutil.copytree(adapter, copy / "adapters" / "recovery")
        with pytest.raises(MismatchError):
            vivace.load(copy)
        assert vivace.load(copy, recovery=False).adapters.names == []
    unrounded = tmp_path / "unrounded"
    shutil.copytree(stored, unrounded)
    shutil.copytree(folder / "adapters" / "recovery", unrounded / "adapters" / "recovery")
    with pytest.raises(MismatchError, match="trained on base"):
        vivace.load(unrounded)
    assert recovery_of(rounded) is None


def test_what_it_was_made_of_is_named_and_of_the_same_shape(rounded: Path, stored: Path, tmp_path: Path) -> None:
    engine = vivace.load(rounded, kernels="torch")
    with pytest.raises(ConfigError, match="stored=MODEL"):
        train_beside(RECIPE, engine, ROWS, tmp_path / "out", Lines(lambda text: None))
    other = make_checkpoint(tmp_path / "other", layers=3)
    recipe = replace(RECIPE, stored=str(other))
    with pytest.raises(MismatchError, match="another shape"):
        train_beside(recipe, engine, ROWS, tmp_path / "out", Lines(lambda text: None))
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_its_recipe_ships() -> None:
    found = recipe_of(recipe_named("recover"))
    assert isinstance(found, RecoverRecipe)
    assert (found.rank, found.folder) == (16, "recovery")
