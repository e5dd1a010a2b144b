"""Adapters learn on a base that is read while they do: the weights that the resident base gives, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vivace
from benchmarks.expert_traces import RecordingPolicy
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import load_adapter
from vivace.checkpoint.upcycle import upcycle_checkpoint
from vivace.core.step import Step
from vivace.decode.shallow import DraftPlan
from vivace.engine import Engine
from vivace.errors import UnsupportedError
from vivace.methods.multirate.config import MultirateConfig
from vivace.prompts import Prompt
from vivace.recipes.foresight import ForesightRecipe
from vivace.recipes.frozen import FrozenRecipe
from vivace.recipes.multirate import MultirateRecipe
from vivace.recipes.trainer import train_beside
from vivace.storage.budget import plan_memory
from vivace.storage.convert import write_store
from vivace.storage.experts.foresight.config import ForesightConfig
from vivace.storage.store import Layout, open_store
from vivace.train.config import LoopConfig
from vivace.train.report import Lines

WORDS = [Prompt(f"{a}{b}{a}", (f"{b}{a}{b}",)) for a in "abcdefgh" for b in "klmnopqr"]
SHARED = {
    "loop": LoopConfig(steps=3, warmup_steps=1, report_steps=3),
    "tokens_per_batch": 128,
    "held_back": 8,
}
MULTIRATE = MultirateRecipe(
    kind="multirate",
    adapter=MultirateConfig(exit_layer=2, rank=4, bottleneck=8),
    plan=DraftPlan.chain(2),
    **SHARED,  # type: ignore[arg-type]
)
FORESIGHT = ForesightRecipe(adapter=ForesightConfig(rank=4, bottleneck=8), **SHARED)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "dense", layers=4)


@pytest.fixture(scope="module")
def mixture(dense: Path) -> Path:
    return upcycle_checkpoint(dense, dense.parent / "moe", num_experts=4, noise=0.5)


@contextmanager
def stored(model: Path, folder: Path, share: float, layout: Layout = "layers") -> Iterator[Engine]:
    """A store of a checkpoint in a share of its memory."""
    store = write_store(model, folder / "store", layout=layout, kernels="torch").folder
    found = open_store(store)
    whole = plan_memory(found, None, found.config.max_positions).num_bytes
    engine = vivace.load(store, memory=int(share * whole), reader="buffered", kernels="torch")
    assert engine.storage is not None
    assert engine.storage.plan.streamed
    yield engine
    engine.storage.close()


def learnt(recipe: FrozenRecipe, engine: Engine, out: Path) -> dict[str, Tensor]:
    notes: list[str] = []
    runs = train_beside(recipe, engine, WORDS, out, Lines(notes.append))
    assert all(run.identical for run in runs)
    return dict(load_adapter(out)[1])


@pytest.mark.parametrize("recipe", [MULTIRATE, FORESIGHT], ids=["multirate", "foresight"])
def test_the_weights_are_those_of_the_resident_base(
    recipe: FrozenRecipe, dense: Path, mixture: Path, tmp_path: Path
) -> None:
    model = mixture if recipe is FORESIGHT else dense
    resident = learnt(recipe, vivace.load(model, kernels="torch"), tmp_path / "resident")
    with stored(model, tmp_path, 0.9) as engine:
        found = learnt(recipe, engine, tmp_path / "streamed")
        assert engine.storage is not None
        assert engine.storage.async_reader.traffic.num_bytes > 0
    assert set(found) == set(resident)
    assert all(torch.equal(found[name], resident[name]) for name in resident)


def gradient(engine: Engine) -> Tensor:
    """Of the sum of what leaves at the top with respect to what enters the first layer."""
    tokens = torch.arange(12)
    step = Step.dense(2, 6)
    h = engine.model.embed(tokens, step).detach().requires_grad_()
    engine.model.norm(engine.model.run(h, step)).pow(3).sum().backward()
    assert h.grad is not None
    return h.grad


@pytest.mark.parametrize("has_experts", [False, True])
def test_gradients_pass_what_is_not_there_any_more(
    has_experts: bool, dense: Path, mixture: Path, tmp_path: Path
) -> None:
    model = mixture if has_experts else dense
    with stored(model, tmp_path, 0.9) as engine:
        found, resident = gradient(engine), gradient(vivace.load(model, kernels="torch"))
    if has_experts:  # experts add to a row's gradient in the order in which they came
        assert (found - resident).norm() < 1e-5 * resident.norm()
    else:
        assert torch.equal(found, resident)


def test_going_back_through_experts_is_no_pass(mixture: Path, tmp_path: Path) -> None:
    with stored(mixture, tmp_path, 0.9) as engine:
        assert engine.storage is not None
        cache = engine.storage.experts
        assert cache is not None
        recording = cache.policy = RecordingPolicy(cache.policy, 4)
        trace = recording.trace
        gradient(engine)
        loads = cache.counts.loads
        assert [visit.clock for visit in trace.visits] == list(range(4))
        gradient(engine)
        assert cache.counts.loads > loads, "there is not room for all"
        assert [visit.clock for visit in trace.visits] == list(range(8))
        assert cache.counts.uses == sum(len(visit.chosen) for visit in trace.visits)
        assert all(visit.is_prompt for visit in trace.visits), "whole texts are no answer's tokens"


def test_a_base_without_some_neurons_is_refused(dense: Path, tmp_path: Path) -> None:
    with (
        stored(dense, tmp_path, 0.9, layout="selected") as engine,
        pytest.raises(UnsupportedError, match="convert the model with layout layers"),
    ):
        gradient(engine)


def test_foresight_is_timed_where_experts_are_read(mixture: Path, tmp_path: Path) -> None:
    """Beside experts in memory it costs and gains nothing, so the training says where it gains instead."""
    notes: list[str] = []
    engine = vivace.load(mixture, kernels="torch")
    assert train_beside(FORESIGHT, engine, WORDS, tmp_path / "whole", Lines(notes.append)) == []
    assert "they load experts ahead of time from a store: vivace convert STORE --store" in notes[-1]
    with stored(mixture, tmp_path, 0.8) as read:
        runs = train_beside(FORESIGHT, read, WORDS, tmp_path / "read", Lines(notes.append))
    assert [run.method for run in runs] == ["plain", "foresight"]
