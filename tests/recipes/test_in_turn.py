"""Trainings that take turns over one frozen pass give the weights of trainings that ran alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
from tests.recipes.test_answers import QUIET, write
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import base_hash, load_adapter
from vivace.core.model import Decoder
from vivace.errors import ConfigError, UnsupportedError
from vivace.methods.multirate.objective import MultirateObjective
from vivace.recipes.answers import AnswersFile, read_answers
from vivace.recipes.frozen import FrozenRecipe
from vivace.recipes.kinds import recipe_named, recipe_of
from vivace.recipes.reading import override
from vivace.recipes.trainer import train_beside, train_in_turn
from vivace.train.distillation import FrozenPass, SharedPasses
from vivace.train.objective import LossParts
from vivace.train.report import Lines
from vivace.train.resume import read_state

SAME = (
    *("loop.minutes=null", "loop.steps=6", "loop.warmup_steps=2", "loop.autocast=true", "loop.accumulate=1"),
    *("tokens_per_batch=96", "longest=24", "held_back=8"),
)
CHANGES = {
    "multirate": ("adapter.exit_layer=2", "find_reach=1", "adapter.rank=4", "adapter.bottleneck=8"),
    "deed": ("adapter.exit_layer=2",),
    "medusa": ("adapter.heads=2", "adapter.own_output=false"),
    "eagle": (),
    "uno": ("adapter.block=3",),
    "multistream": ("adapter.insertion_layer=2", "adapter.pruner_rank=0"),
    "draft": ("layers=[0,3]",),
}


def recipe(kind: str, *changes: str) -> FrozenRecipe:
    found = recipe_of(override(recipe_named(kind), [*SAME, *CHANGES[kind], *changes]))
    assert isinstance(found, FrozenRecipe)
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), layers=4)


@pytest.fixture
def answers(checkpoint: Path, tmp_path: Path) -> AnswersFile:
    return read_answers(write(tmp_path / "own.jsonl", checkpoint), base_hash(checkpoint))


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    state: dict[str, Any] = read_state(out / "run" / "state.pt")
    parts = state["optimiser"]["parts"]
    return {f"{part}.{at}": value for part, one in enumerate(parts) for at, value in enumerate(one["masters"])}


def test_each_learns_what_it_learns_alone_from_one_pass_for_all(
    checkpoint: Path, answers: AnswersFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = {kind: recipe(kind) for kind in CHANGES}
    for kind, one in recipes.items():
        engine = vivace.load(checkpoint, kernels="torch")
        train_beside(one, engine, [], tmp_path / "alone" / kind, QUIET, answers=answers, is_timed=False)
    made = list[int]()
    whole = FrozenPass._made

    def counted(model: Decoder, *given: Any) -> FrozenPass:
        made.append(1)
        return whole(model, *given)

    monkeypatch.setattr(FrozenPass, "_made", staticmethod(counted))
    engine = vivace.load(checkpoint, kernels="torch")
    outs = {tmp_path / "turns" / kind: one for kind, one in recipes.items()}
    train_in_turn(outs, engine, answers, lambda out: QUIET)
    for kind in recipes:
        alone, turns = weights_of(tmp_path / "alone" / kind), weights_of(tmp_path / "turns" / kind)
        assert alone.keys() == turns.keys()
        assert all(torch.equal(alone[name], turns[name]) for name in alone), kind
    # six steps, a second pass in the first of them for each set of depths that joins, and at the end held-back rows
    # of every training; alone there would be 42 for the steps
    assert len(made) < 6 + len(recipes) + 2 * len(recipes)


def test_a_killed_series_goes_on_and_arrives_at_the_same_weights(
    checkpoint: Path, answers: AnswersFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ("loop.snapshot_s=0",)
    whole = {tmp_path / "whole" / kind: recipe(kind, *changes) for kind in ("multirate", "medusa")}
    train_in_turn(whole, vivace.load(checkpoint, kernels="torch"), answers, lambda out: QUIET)

    losses, steps = MultirateObjective.losses, list[int]()

    def until_killed(self: MultirateObjective, model: Decoder, batch: Any) -> LossParts:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        yield from losses(self, model, batch)

    outs = {tmp_path / "killed" / kind: recipe(kind, *changes) for kind in ("multirate", "medusa")}
    with monkeypatch.context() as patched:
        patched.setattr(MultirateObjective, "losses", until_killed)
        with pytest.raises(KeyboardInterrupt):
            train_in_turn(outs, vivace.load(checkpoint, kernels="torch"), answers, lambda out: QUIET)
    notes = list[str]()
    train_in_turn(outs, vivace.load(checkpoint, kernels="torch"), answers, lambda out: Lines(notes.append))
    assert sum("resumed after step 3" in note for note in notes) == 2
    for kind in ("multirate", "medusa"):
        found, other = weights_of(tmp_path / "whole" / kind), weights_of(tmp_path / "killed" / kind)
        assert all(torch.equal(found[name], other[name]) for name in found)
    assert load_adapter(tmp_path / "killed" / "multirate")[0]["kind"] == "multirate"


def test_minutes_count_the_pass_for_each_and_no_step_of_another(
    checkpoint: Path, answers: AnswersFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that a pass moves by .05 s and the own part of a step by .01 s, the second training's by .1 s."""
    now, whole, losses = [0.0], FrozenPass._made, MultirateObjective.losses

    def slow(model: Decoder, *given: Any) -> FrozenPass:
        now[0] += 0.05
        return whole(model, *given)

    def slower(self: MultirateObjective, model: Decoder, batch: Any) -> LossParts:
        now[0] += 0.1 if self.accelerator.config.rank == 2 else 0.01
        yield from losses(self, model, batch)

    monkeypatch.setattr(FrozenPass, "_made", staticmethod(slow))
    monkeypatch.setattr(MultirateObjective, "losses", slower)
    monkeypatch.setattr(time, "process_time", lambda: now[0])
    budget = ("loop.steps=null", "loop.minutes=0.02", "loop.clock=processor")
    outs = {
        tmp_path / "fast": recipe("multirate", *budget),
        tmp_path / "slow": recipe("multirate", *budget, "adapter.rank=2"),
    }
    train_in_turn(outs, vivace.load(checkpoint, kernels="torch"), answers, lambda out: QUIET)
    fast, slow_one = (read_state(out / "run" / "state.pt")["progress"] for out in outs)
    assert fast["elapsed_s"] == pytest.approx(0.06 * fast["step"])
    assert slow_one["elapsed_s"] == pytest.approx(0.15 * slow_one["step"])
    # both end with the first step that passes 1.2 s
    assert (fast["step"], slow_one["step"]) == (20, 8)


def test_a_pass_is_taken_for_the_same_tokens_and_depths_only(checkpoint: Path) -> None:
    model = vivace.load(checkpoint, kernels="torch").model
    first, second = torch.arange(8).view(2, 4), torch.arange(8).view(2, 4) + 1
    with SharedPasses() as passes:
        found = FrozenPass.of(model, first, (1,))
        assert FrozenPass.of(model, first.clone(), ()) is found
        wider = FrozenPass.of(model, first, (2,))
        assert wider is not found
        assert set(wider.residuals) == {0, 1, 2, 4}
        assert FrozenPass.of(model, second, (2,)) is not wider
        assert FrozenPass.of(model, second.view(4, 2), (2,)).step.num_rows == 8
        assert passes.saved_s > 0
    assert FrozenPass.of(model, second, ()) is not FrozenPass.of(model, second, ())


def bad() -> Iterator[tuple[str, Callable[[Path], dict[Path, FrozenRecipe]], type[Exception]]]:
    yield (
        "the same seed",
        lambda out: {out / "a": recipe("medusa"), out / "b": replace(recipe("eagle"), seed=1)},
        ConfigError,
    )
    yield (
        "and autocast",
        lambda out: {out / "a": recipe("medusa"), out / "b": recipe("eagle", "loop.autocast=false")},
        ConfigError,
    )
    clock = ("loop.steps=null", "loop.minutes=1")
    yield "accumulate=1", lambda out: {out / "a": recipe("medusa", "loop.accumulate=2")}, ConfigError
    yield "clock=processor", lambda out: {out / "a": recipe("medusa", *clock)}, ConfigError


@pytest.mark.parametrize(("message", "recipes", "error"), list(bad()), ids=["seeds", "arithmetic", "batches", "clock"])
def test_what_cannot_take_turns_is_refused(
    message: str,
    recipes: Callable[[Path], dict[Path, FrozenRecipe]],
    error: type[Exception],
    checkpoint: Path,
    answers: AnswersFile,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=message):
        train_in_turn(recipes(tmp_path), vivace.load(checkpoint, kernels="torch"), answers, lambda out: QUIET)


def test_what_trains_nothing_is_refused(checkpoint: Path, answers: AnswersFile, tmp_path: Path) -> None:
    found = recipe_of(override(recipe_named("calm"), ["held_back=8", "longest=24", "adapter.exit_layers=[1,2]"]))
    assert isinstance(found, FrozenRecipe)
    with pytest.raises(UnsupportedError, match="trains no weights"):
        train_in_turn(
            {tmp_path / "a": replace(found, tokens_per_batch=96)},
            vivace.load(checkpoint, kernels="torch"),
            answers,
            lambda out: QUIET,
        )
