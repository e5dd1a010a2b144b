"""Trainings on another device than the CPU: every tensor of a step is made there, and the losses are the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
from tests.core.foreign_device import FOREIGN, foreign_device
from tests.recipes.test_seq2seq_trainer import PROMPTS as SOURCES
from tests.recipes.test_seq2seq_trainer import RECIPE as SEQ2SEQ
from tests.recipes.test_trainer import RECIPE, WORDS
from tests.recipes.test_whole_trainer import PROMPTS
from tests.recipes.test_whole_trainer import RECIPE as DECODER
from tests.tiny_checkpoints import make_adapter, make_checkpoint
from vivace.checkpoint.adapters import load_adapter
from vivace.errors import CapacityError
from vivace.methods.multirate.config import MultirateConfig
from vivace.recipes import regenerate, seq2seq_trainer, trainer, whole_trainer
from vivace.recipes.frozen import FrozenRecipe, TrainContext
from vivace.recipes.kinds import recipe_named, recipe_of
from vivace.recipes.reading import override
from vivace.train import loop, memory
from vivace.train.config import TrainConfig
from vivace.train.loop import TrainResult
from vivace.train.report import Lines

QUIET = Lines(lambda line: None)
STEPS = replace(RECIPE.loop, steps=4, evaluate_steps=2)
FAR = replace(
    RECIPE,
    loop=STEPS,
    find_reach=2,
    adapter=MultirateConfig(exit_layer=2, rank=4, bottleneck=8, feedback=True),
    plan=replace(RECIPE.plan, vocabulary=64),
)
SHORT = (
    "loop.minutes=null",
    "loop.steps=3",
    "loop.warmup_steps=1",
    "tokens_per_batch=128",
    "longest=64",
    "held_back=8",
)
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), layers=4)


@pytest.fixture
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots stay in memory: the device that stands for a GPU has no form on disk."""
    kept: dict[Path, Any] = {}

    def keep(path: Path, content: dict[str, Any]) -> None:
        kept[path] = {**content, "params": [p.clone() for p in content["params"]]}

    monkeypatch.setattr(loop, "write_state", keep)
    monkeypatch.setattr(loop, "read_state", lambda path: kept[path])
    monkeypatch.setattr(loop, "save_snapshot", lambda *_: None)
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    for module in (whole_trainer, seq2seq_trainer):
        monkeypatch.setattr(module, "_save", lambda *_: None)
        monkeypatch.setattr(module, "choose_device", torch.device)


def beside(recipe: FrozenRecipe, checkpoint: Path, device: torch.device) -> TrainResult:
    """Train without saving."""
    engine = vivace.load(checkpoint, kernels="torch", dtype="float32")
    engine.model.to(device)
    context = TrainContext.of(recipe, engine, WORDS, Path("out"), QUIET)
    torch.manual_seed(recipe.seed)
    trainable = recipe.begin(context)
    assert trainable.objective is not None
    context.require_memory(trainable)
    config = TrainConfig(recipe.loop, recipe.optimiser, recipe.seed, context.plan_text("base"))
    return loop.fit(engine.model, trainable.objective, context.data(), config, folder=Path("out/run"), report=QUIET)


def same(train: Callable[[torch.device], TrainResult], rel: float = 2e-3) -> None:
    expected = train(torch.device("cpu"))
    with foreign_device():
        found = train(FOREIGN)
    assert found.progress.step == expected.progress.step > 1
    assert dict(found.held_back) == pytest.approx(dict(expected.held_back), rel=rel)


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize("kind", ["far", "eagle", "lora"])
def test_weights_beside_a_model(checkpoint: Path, kind: str) -> None:
    found = FAR if kind == "far" else recipe_of(override(recipe_named(kind), SHORT))
    assert isinstance(found, FrozenRecipe)
    same(lambda device: beside(found, checkpoint, device))


@pytest.mark.usefixtures("_kept")
def test_all_weights_of_a_decoder(tmp_path: Path) -> None:
    """From a shape, in two stages, the second with more layers."""
    stages = tuple(replace(stage, loop=replace(stage.loop, steps=3)) for stage in DECODER.stages)
    recipe = replace(DECODER, stages=stages)

    def train(device: torch.device) -> TrainResult:
        return whole_trainer.train_whole(recipe, PROMPTS, tmp_path / "out", QUIET, device=device)

    same(train)


@pytest.mark.usefixtures("_kept")
def test_all_weights_of_an_encoder_decoder(tmp_path: Path) -> None:
    recipe = replace(SEQ2SEQ, loop=replace(SEQ2SEQ.loop, steps=3))

    def train(device: torch.device) -> TrainResult:
        return seq2seq_trainer.train_seq2seq(recipe, SOURCES, tmp_path / "out", QUIET, device=device)

    same(train)


def test_weights_that_are_on_a_gpu_are_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    need = memory.MemoryEstimate(weights=100, gradients=5, optimiser=5, activations=5)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 20)
    memory.require_memory(need, torch.device("cuda"))
    with pytest.raises(CapacityError, match="20 B are free"):
        memory.require_memory(need, torch.device("cpu"))
    monkeypatch.setattr(memory, "free_bytes", lambda device: 14)
    with pytest.raises(CapacityError):
        memory.require_memory(need, torch.device("cuda"))


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=gpu) for kind in ("chat", "eagle", "lora", "multistream")])
def test_a_gpu_trains_what_decodes(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    """Whole trainings with text of the model's own, in bfloat16, and what they wrote."""
    small = {"chat": ("adapter.exit_layer=2", "own_tokens=4000"), "multistream": ("adapter.insertion_layer=2",)}
    values = override(recipe_named(kind), [*SHORT, *small.get(kind, ())])
    found = recipe_of({"own_tokens": 4000, **values})
    assert isinstance(found, FrozenRecipe)
    base = tmp_path / "base"
    make_checkpoint(base, layers=4)
    (base / "chat_template.jinja").unlink()
    engine = vivace.load(base, kernels="torch", device="cuda", dtype="bfloat16")
    timings = trainer.train_beside(found, engine, [], tmp_path / "out", QUIET)
    assert all(run.identical for run in timings)
    if kind != "lora":
        assert load_adapter(tmp_path / "out")[0]["kind"] == found.kind


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_a_gpu_trains_all_weights(tmp_path: Path, device: str) -> None:
    found = whole_trainer.train_whole(DECODER, PROMPTS, tmp_path / "decoder", QUIET, device=device)
    again = whole_trainer.train_whole(DECODER, PROMPTS, tmp_path / "decoder", QUIET, device=device)
    assert found.progress.step == again.progress.step
    vivace.load(tmp_path / "decoder").generate("a", max_new_tokens=4)
    seq2seq_trainer.train_seq2seq(SEQ2SEQ, SOURCES, tmp_path / "t5", QUIET, device=device)
    vivace.load(tmp_path / "t5").generate("a", max_new_tokens=4)


def test_a_decoder_is_not_loaded_twice_where_it_decodes_as_it_is_trained(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = vivace.load(checkpoint, kernels="torch")
    place = make_adapter(tmp_path / "fast", checkpoint)
    monkeypatch.setattr(regenerate, "decodes_apart", lambda device: False)
    plain, fast = regenerate.as_it_decodes(engine), regenerate.as_it_decodes(engine, {"multirate": place})
    assert plain.model is fast.model is engine.model
    texts = [
        plain.generate("aka", method="plain", max_new_tokens=9),
        fast.generate("aka", method="multirate", max_new_tokens=9),
    ]
    assert texts[0][0].token_ids == texts[1][0].token_ids
    assert texts[1][0].stats.num_draft_tokens > 0
    assert "multirate" not in engine.methods.ready()
    monkeypatch.setattr(regenerate, "decodes_apart", lambda device: True)
    assert regenerate.as_it_decodes(engine).model is not engine.model
