"""A few steps lower each rival's loss, the frozen base keeps its bits, and what was trained decodes the same text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import load_adapter
from vivace.decode.shallow import DraftPlan
from vivace.decode.tree import TreePlan
from vivace.errors import ConfigError
from vivace.methods.early_exit.drafter import ExitConfig
from vivace.methods.medusa.drafter import MedusaConfig
from vivace.methods.uno.drafter import UnoConfig
from vivace.prompts import Prompt
from vivace.recipes.draft import DraftRecipe
from vivace.recipes.frozen import TrainContext
from vivace.recipes.kinds import recipe_of
from vivace.recipes.method import MethodRecipe, method_recipe
from vivace.recipes.quantized import QuantizedRecipe
from vivace.recipes.scratch import ShapeConfig
from vivace.recipes.trainer import train_beside
from vivace.train.config import LoopConfig
from vivace.train.data import TokenBatch
from vivace.train.optim import OptimiserConfig
from vivace.train.report import Lines, StepMeans

WORDS = [Prompt(f"{a}{b}{a}", (f"{b}{a}{b}",)) for a in "abcdefgh" for b in "klmnopqr"]
SETTINGS = {"loop": LoopConfig(steps=5, warmup_steps=1), "tokens_per_batch": 128, "held_back": 8}
RECIPES: dict[str, MethodRecipe] = {
    "medusa": method_recipe("medusa")(**SETTINGS, adapter=MedusaConfig(2), plan=TreePlan((2, 1))),
    "eagle": method_recipe("eagle")(**SETTINGS, plan=DraftPlan((2, 1))),
    "deed": method_recipe("deed")(**SETTINGS, adapter=ExitConfig(2, 8), plan=DraftPlan.chain(3)),
    "uno": method_recipe("uno")(**SETTINGS, adapter=UnoConfig(4, 4), plan=TreePlan((1, 1, 1))),
    "uno of few tokens": method_recipe("uno")(**SETTINGS, adapter=UnoConfig(4, 4), plan=TreePlan((1,), vocabulary=20)),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return make_checkpoint(tmp_path_factory.mktemp("base"), layers=4)


def batch(engine: vivace.Engine) -> TokenBatch:
    tokens = torch.randint(0, engine.model.config.vocab_size, (6, 16), generator=torch.Generator().manual_seed(1))
    return TokenBatch(tokens, torch.arange(16).expand(6, 16) >= 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "eagle", "deed", "uno"])
def test_a_trained_rival_decodes_the_same_text(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    runs = train_beside(
        RECIPES[kind], vivace.load(checkpoint, kernels="torch"), WORDS, tmp_path / kind, Lines(lambda _: None)
    )
    assert [run.method for run in runs] == ["plain", kind]
    assert all(run.identical for run in runs)
    engine = vivace.load(checkpoint, adapters={kind: tmp_path / kind})
    plain, fast = (engine.generate("aka", method=m, max_new_tokens=24)[0] for m in ("plain", kind))
    assert plain.token_ids == fast.token_ids
    assert fast.stats.num_draft_tokens > 0
    assert load_adapter(tmp_path / kind)[0]["kind"] == kind


@pytest.mark.parametrize("kind", RECIPES)
def test_steps_lower_the_loss_and_leave_the_base_alone(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    engine = vivace.load(checkpoint, kernels="torch")
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    torch.manual_seed(0)
    trainee = RECIPES[kind].begin(TrainContext.of(RECIPES[kind], engine, WORDS, tmp_path, Lines(lambda _: None)))
    params = [p for group in trainee.objective.groups() for p in group["params"]]
    optimiser = torch.optim.Adam(params, lr=0.01)
    losses = []
    for _ in range(6):
        optimiser.zero_grad()
        losses.append(0.0)
        for loss, seen in trainee.objective.losses(engine.model, batch(engine)):
            loss.backward()
            losses[-1] += float(loss.detach()) if seen else 0.0
        assert all(p.grad is not None for p in params)
        optimiser.step()
    assert losses[-1] < losses[0]
    assert all(torch.equal(value, before[name]) for name, value in engine.model.state_dict().items())


class Killed(Lines):
    """A run that is killed after its third step, with a snapshot of the second."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)

    def reading(self, reading: StepMeans) -> None:
        if reading.step == 3:
            raise KeyboardInterrupt


SNAPSHOTS = LoopConfig(steps=5, warmup_steps=1, report_steps=1, snapshot_s=0.0)


def test_a_killed_run_ends_with_the_same_weights(checkpoint: Path, tmp_path: Path) -> None:
    """UNO's, which draws where its blocks hang."""
    recipe = replace(RECIPES["uno"], loop=SNAPSHOTS)
    quiet = Lines(lambda _: None)
    train_beside(recipe, vivace.load(checkpoint, kernels="torch"), WORDS, tmp_path / "whole", quiet)
    with pytest.raises(KeyboardInterrupt):
        train_beside(recipe, vivace.load(checkpoint, kernels="torch"), WORDS, tmp_path / "cut", Killed())
    train_beside(recipe, vivace.load(checkpoint, kernels="torch"), WORDS, tmp_path / "cut", quiet)
    whole, cut = (load_adapter(tmp_path / name)[1] for name in ("whole", "cut"))
    assert all(torch.equal(value, cut[name]) for name, value in whole.items())
    assert any(bool(value.any()) for name, value in whole.items() if name.startswith("up"))


def test_a_trained_draft_model_is_a_checkpoint_that_drafts(checkpoint: Path, tmp_path: Path) -> None:
    shape = ShapeConfig(num_layers=1, width=16, ffn_width=16, num_heads=2, num_kv_heads=1, head_dim=8)
    recipe = DraftRecipe(**SETTINGS, shape=shape, optimiser=OptimiserConfig(adamw_rate=0.01))
    runs = train_beside(
        recipe, vivace.load(checkpoint, kernels="torch"), WORDS, tmp_path / "small", Lines(lambda _: None)
    )
    assert [run.method for run in runs] == ["plain", "draft"]
    assert all(run.identical for run in runs)
    assert vivace.load(tmp_path / "small").model.config.num_layers == 1


def test_a_draft_model_may_start_as_layers_of_the_base(checkpoint: Path, tmp_path: Path) -> None:
    base = vivace.load(checkpoint, kernels="torch")
    shape = ShapeConfig(num_layers=1, width=16, ffn_width=16, num_heads=2, num_kv_heads=1, head_dim=8)
    recipe = DraftRecipe(**SETTINGS, shape=shape, layers=(0, 1, 3))
    trainee = recipe.begin(TrainContext.of(recipe, base, WORDS, tmp_path, Lines(lambda _: None)))
    begun = trainee.student.state_dict()
    assert torch.equal(begun["embedding"], base.model.embedding)
    for place, layer in enumerate((0, 1, 3)):
        for name, value in base.model.layers[layer].state_dict().items():
            assert torch.equal(begun[f"layers.{place}.{name}"], value)
    runs = train_beside(recipe, base, WORDS, tmp_path / "cut", Lines(lambda _: None))
    assert all(run.identical for run in runs)
    assert vivace.load(tmp_path / "cut").model.config.num_layers == 3
    with pytest.raises(ConfigError, match="layers must rise and lie below 4"):
        train_beside(replace(recipe, layers=(1, 4)), base, WORDS, tmp_path / "wrong", Lines(lambda _: None))


def test_an_exit_with_nothing_to_train_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    recipe = method_recipe("deed")(**SETTINGS, adapter=ExitConfig(2))
    with pytest.raises(ConfigError, match=r"set adapter\.bottleneck"):
        train_beside(recipe, vivace.load(checkpoint, kernels="torch"), WORDS, tmp_path / "x", Lines(lambda _: None))


@pytest.mark.parametrize("method", ["lookahead", "layerskip"])
def test_methods_without_weights_run_on_any_model(checkpoint: Path, method: str) -> None:
    engine = vivace.load(checkpoint, kernels="torch")
    plain, fast = (engine.generate("aka", method=m, max_new_tokens=24)[0] for m in ("plain", method))
    assert plain.token_ids == fast.token_ids
    assert fast.stats.num_draft_tokens > 0
    assert method in engine.methods.ready()


@pytest.mark.parametrize(("kind", "adapter"), [("medusa", MedusaConfig(2)), ("uno", UnoConfig(2))])
def test_a_plan_deeper_than_the_weights_is_refused_before_the_training(kind: str, adapter: object) -> None:
    recipe = method_recipe(kind)
    assert len(recipe(**SETTINGS, adapter=adapter).plan.widths) == 2
    assert len(recipe(**SETTINGS).plan.widths) == 4
    with pytest.raises(ConfigError, match=r"plan\.widths \[1, 1, 1\] go deeper than adapter\.(heads|block) 2; shorten"):
        recipe(**SETTINGS, adapter=adapter, plan=TreePlan((1, 1, 1)))
    given = {"kind": kind, "loop": {"steps": 5, "warmup_steps": 1}, "plan": {"widths": [1, 1, 1, 1]}}
    assert recipe_of(given).plan == TreePlan((1,) * 4)  # type: ignore[union-attr]


def test_a_tree_in_four_bits_is_refused_before_the_calibration() -> None:
    with pytest.raises(ConfigError, match=r"plan\.widths must be all 1, found \[2, 1\]"):
        QuantizedRecipe(plan=DraftPlan((2, 1), weights="q4"))
