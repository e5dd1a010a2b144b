"""Leaving early by confidence, skipping layers by place: nothing lost when shut, and no slot minds others."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import vivace
from tests.decode.oracles import plain_text
from tests.decode.runs import finish
from tests.decode.tiny_decoders import prompts
from tests.methods.dynamic.gated import text_batch
from tests.methods.rivals.conftest import noisy
from tests.methods.rivals.test_training import WORDS, batch, checkpoint  # noqa: F401
from tests.objectives.case import BATCH, trained
from vivace.core.step import Step
from vivace.decode.depth import ExitThresholds
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.errors import ConfigError, MismatchError
from vivace.methods.confidence.drafter import (
    Confidence,
    ConfidenceConfig,
    ConfidencePlan,
    ConfidenceScores,
    ConfidentDepth,
    calibrated,
    confidence_scores,
)
from vivace.methods.skipdecode.drafter import SkipDecode, SkipObjective, SkipPlan
from vivace.recipes.confidence import ConfidenceRecipe
from vivace.recipes.decoder import DecoderRecipe, Stage
from vivace.recipes.kinds import recipe_of
from vivace.recipes.trainer import train_beside
from vivace.recipes.whole import SupervisedRecipe
from vivace.recipes.whole_trainer import train_whole
from vivace.train.config import LoopConfig
from vivace.train.data import Row, collate
from vivace.train.optim import OptimiserConfig
from vivace.train.report import Lines
from vivace.train.supervised import SupervisedObjective, Supervision

COUNT, LAYERS = 12, 6
MEASURES = ["softmax", "cosine", "learned", "probability"]


@pytest.fixture(scope="module")
def deep(base):
    return lambda dtype: base(dtype, num_layers=LAYERS)


def confident(model, measure: str, thresholds: tuple[float | None, ...], missing: str = "propagate") -> ConfidentDepth:
    torch.manual_seed(1)
    weights = noisy(Confidence(ConfidenceConfig((2, 4), measure), model.config), model.dtype)
    return ConfidentDepth("calm", weights, ConfidencePlan((ExitThresholds(0.98, thresholds),), missing))


@cache
def whole(model):
    """What plain decoding makes of four prompts."""
    return [plain_text(model, prompt, COUNT) for prompt in prompts(4, seed=2)]


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("thresholds", [(None, None), (2.0, 2.0)])
def test_who_is_never_sure_decodes_plainly(deep, measure, thresholds) -> None:
    model = deep(torch.float32)
    texts = whole(model)
    drafter = confident(model, measure, thresholds)
    session = Session(model, num_slots=3, capacity=64, chunk=8)
    for result, text in zip(finish(session, [Request(t.prompt, COUNT, drafter) for t in texts]), texts, strict=True):
        assert result.tokens == text.new
        assert result.stats.exit_layers == [LAYERS] * COUNT


@pytest.mark.parametrize("measure", MEASURES)
def test_lower_thresholds_let_more_leave(deep, measure) -> None:
    model = deep(torch.float32)
    told = confidence_scores(model, Confidence(ConfidenceConfig((2, 4), measure), model.config), [text_batch(1)])
    middle = float(told.scores[:, 0].median())
    shares = []
    for threshold in (2.0, middle, -2.0):
        session = Session(model, num_slots=2, capacity=64, chunk=8)
        drafter = confident(model, measure, (threshold, None))
        found = finish(session, [Request(prompt, COUNT, drafter) for prompt in prompts(4, seed=2)])
        shares.append(sum(layer == 2 for result in found for layer in result.stats.exit_layers))
    assert shares[0] == 0
    assert shares[2] == 4 * COUNT
    assert shares[0] <= shares[1] <= shares[2]


@pytest.mark.parametrize("missing", ["propagate", "deferred", "mask"])
def test_a_batch_says_what_each_says_alone(deep, missing) -> None:
    model = deep(torch.bfloat16)
    drafter = confident(model, "softmax", (0.05, 0.02), missing)
    asked = [Request(prompt, COUNT, drafter) for prompt in prompts(6, seed=4)]
    together = finish(Session(model, num_slots=3, capacity=64, chunk=8), asked, every=2)
    alone = [finish(Session(model, num_slots=1, capacity=64, chunk=8), [request])[0] for request in asked]
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert len({layer for r in together for layer in r.stats.exit_layers}) > 1


def test_thresholds_keep_the_stated_agreement() -> None:
    generator = torch.Generator().manual_seed(0)
    ease, noise, luck = torch.rand(3, 8000, generator=generator)
    scores = torch.stack((ease, (ease + noise) / 2), 1)  # who is easy at the first gate is easy at the second
    agrees = torch.stack((luck < ease.sqrt(), luck < ease.sqrt() + 0.3), 1)
    told = ConfidenceScores(scores, agrees)
    left = torch.ones(8000, dtype=torch.bool)
    for gate, threshold in enumerate(calibrated(told, 0.8).thresholds):
        assert threshold is not None
        leaving = left & (scores[:, gate] > threshold)
        assert leaving.sum() >= 20
        assert agrees[leaving, gate].float().mean() >= 0.8 - 1e-6
        left &= ~leaving
    assert calibrated(ConfidenceScores(scores, torch.zeros_like(agrees)), 0.9).thresholds == (None, None)
    lower = calibrated(told, 0.7).thresholds[0]
    assert lower is not None
    assert lower < (calibrated(told, 0.9).thresholds[0] or 1)


@pytest.mark.parametrize("is_right_first", [True, False])
def test_equal_scores_exit_together_or_not_at_all(is_right_first: bool) -> None:
    """A threshold inside a run of equal scores lets none of the run exit, and what exits is not what was counted."""
    scores = torch.tensor([0.9] * 30 + [0.5] * 200)[:, None]
    luck = [True] * 190 + [False] * 10
    agrees = torch.tensor([True] * 25 + [False] * 5 + (luck if is_right_first else luck[::-1]))[:, None]
    (threshold,) = calibrated(ConfidenceScores(scores, agrees), 0.95).thresholds
    assert threshold is None  # of the first thirty 83 % agree, of all 93 %
    (threshold,) = calibrated(ConfidenceScores(scores, agrees), 0.92).thresholds
    assert threshold is not None
    assert threshold < 0.5


def test_a_schedule_of_all_layers_is_plain_decoding(deep) -> None:
    model = deep(torch.bfloat16)
    texts = [plain_text(model, prompt, COUNT) for prompt in prompts(4, seed=2)]
    drafter = SkipDecode(model, SkipPlan(LAYERS, LAYERS, 4))
    found = finish(
        Session(model, num_slots=3, capacity=64, chunk=8), [Request(t.prompt, COUNT, drafter) for t in texts]
    )
    assert [r.tokens for r in found] == [t.new for t in texts]


def test_decoding_skips_what_training_skips(deep) -> None:
    """The layers a row passes, and what it reads there, are those of the training's masks."""
    model, plan = deep(torch.float32), SkipPlan(5, 2, 8)
    asked = prompts(5, seed=4)
    drafter = SkipDecode(model, plan)
    session = Session(model, num_slots=2, capacity=64, chunk=64)
    found = finish(session, [Request(prompt, COUNT, drafter) for prompt in asked], every=3)
    objective = SkipObjective(model, plan)
    for prompt, result in zip(asked, found, strict=True):
        rows = collate([Row((*prompt, *result.tokens), len(prompt))])
        with torch.no_grad():
            list(objective.losses(model, rows))
            step = Step.dense(*rows.tokens.shape)
            top = objective._trunk(model, model.embed(rows.tokens.reshape(-1), step), step)
            said = model.head(top).argmax(-1)[len(prompt) - 1 : len(prompt) - 1 + COUNT]
        assert tuple(said.tolist()) == result.tokens
        assert result.stats.exit_layers == sorted(result.stats.exit_layers, reverse=True)
        assert result.stats.exit_layers[0] == 5
        assert result.stats.exit_layers[-1] == 2


def test_thresholds_are_found_and_kept(checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    for measure in ("softmax", "learned"):
        recipe = ConfidenceRecipe(
            kind="calm",
            loop=LoopConfig(steps=3, warmup_steps=1),
            adapter=ConfidenceConfig((1, 2), measure),
            tokens_per_batch=128,
            held_back=24,
        )
        out = tmp_path / measure
        runs = train_beside(recipe, vivace.load(checkpoint, kernels="torch"), WORDS, out, Lines(lambda _: None))
        assert [run.method for run in runs] == ["plain", "calm"]
        engine = vivace.load(checkpoint, adapters={"calm": out})
        stats = engine.generate("aka", method="calm", quality=0.9, max_new_tokens=16)[0].stats
        assert len(stats.exit_layers) == stats.num_tokens
        with pytest.raises(ConfigError, match=r"thresholds of this adapter are for 0\.9, 0\.95, 0\.98, 0\.99"):
            engine.generate("aka", method="calm", quality=0.5)


@pytest.mark.parametrize("kind", ["layerskip", "supervised", "skipdecode", "mod"])
def test_terms_of_the_loss_that_are_not_added_are_refused(kind: str) -> None:
    values = {"kind": "decoder", "stages": [{"loop": {"steps": 4, "warmup_steps": 1}}]}
    for name in ("balance", "sparsity"):
        with pytest.raises(ConfigError, match=rf"decoder\.{name} is for kind: decoder alone; leave it out for {kind}"):
            recipe_of({"kind": kind, "decoder": {**values, name: 0.1}})
    recomputing = {"kind": kind, "decoder": {**values, "recompute": True}}
    if kind == "mod":
        with pytest.raises(ConfigError, match=r"leave out decoder\.recompute"):
            recipe_of(recomputing)
    else:
        recipe = recipe_of({**recomputing, "schedule": {"most": 4, "fewest": 2}})
        assert isinstance(recipe, SupervisedRecipe)
        assert recipe.objective(trained()).recompute


@pytest.mark.parametrize("kind", ["supervised", "skipdecode"])
def test_layers_that_are_computed_again_have_the_same_gradients(kind: str) -> None:
    found = []
    for recompute in (False, True):
        model = trained()
        objective = (
            SkipObjective(model, SkipPlan(4, 2, 3), recompute=recompute)
            if kind == "skipdecode"
            else SupervisedObjective(model, Supervision((1, 3)), recompute=recompute)
        )
        kept = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            for loss, _ in objective.losses(model, BATCH):
                loss.backward()  # type: ignore[no-untyped-call]
        found.append([kept, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[0][1:], found[1][1:])
    assert found[1][0] < found[0][0]


@pytest.mark.parametrize("kind", ["layerskip", "supervised", "skipdecode"])
def test_whole_models_are_trained_for_their_method(checkpoint: Path, tmp_path: Path, kind: str) -> None:  # noqa: F811
    stage = Stage(LoopConfig(steps=4, warmup_steps=1), OptimiserConfig(adamw_rate=0.001, muon_rate=0.005))
    decoder = DecoderRecipe(kind="decoder", stages=(stage,), tokens_per_batch=256, held_back=8)
    layers = (1, 2) if kind == "supervised" else ()
    recipe = SupervisedRecipe(kind, decoder, Supervision(layers, dropout=0.2), SkipPlan(3, 2, 4))
    train_whole(recipe, WORDS, tmp_path / "out", Lines(lambda _: None), checkpoint)
    other = replace(recipe, supervision=Supervision(layers, weight=0.1), schedule=SkipPlan(4, 2, 4))
    with pytest.raises(MismatchError, match="another recipe"):
        train_whole(other, WORDS, tmp_path / "out", Lines(lambda _: None), checkpoint)
    engine = vivace.load(tmp_path / "out", kernels="torch")
    methods = ("plain", "layerskip") if kind != "skipdecode" else ("plain", "skipdecode")
    answers = [engine.generate("aka", method=method, max_new_tokens=12)[0].token_ids for method in methods]
    assert kind == "skipdecode" or answers[0] == answers[1]
    model = engine.model.requires_grad_(True)
    objective = recipe.objective(model)
    for loss, _ in objective.losses(model, batch(engine)):
        loss.backward()
    assert sum(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.layers[0].parameters()) > 0
    with pytest.raises(ConfigError, match=r"must lie inside|the model has 4 layers"):
        replace(recipe, supervision=Supervision((9,)), schedule=SkipPlan(9, 2, 4)).objective(model)
