"""Mixture-of-Depths: routers that know nothing change nothing, and what is routed decodes as it was trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vivace
from tests.decode.oracles import plain_text
from tests.decode.runs import finish
from tests.decode.tiny_decoders import build, prompts
from tests.methods.rivals.conftest import noisy
from tests.methods.rivals.test_training import SNAPSHOTS, WORDS, Killed, batch, checkpoint  # noqa: F401
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder, Layer
from vivace.core.seams import Draft
from vivace.core.step import Step
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.errors import ConfigError, NotFoundError
from vivace.kernels.native import NativeBody
from vivace.methods.mod.drafter import DepthRouters, MixtureOfDepths, ModConfig, ModPlan
from vivace.methods.mod.objective import largest, routed, thresholds_on
from vivace.recipes.decoder import DecoderRecipe, Stage
from vivace.recipes.mod import ModRecipe
from vivace.recipes.whole_trainer import train_whole
from vivace.train.config import LoopConfig
from vivace.train.data import TokenBatch
from vivace.train.report import Lines

COUNT, LAYERS = 12, 6
STAGE = Stage(loop=LoopConfig(steps=6, warmup_steps=1, evaluate_steps=3, snapshot_s=0.0))
RECIPE = ModRecipe(
    "mod",
    DecoderRecipe("decoder", (STAGE,), tokens_per_batch=128, longest=64, held_back=8),
    ModConfig(2, 0.5),
    anneal_steps=4,
)


def mixture(model: Decoder, threshold: float, noise: float = 0.3) -> MixtureOfDepths:
    torch.manual_seed(3)
    routers = noisy(DepthRouters(ModConfig(2), model.config), torch.float32, noise)
    return MixtureOfDepths(routers, ModPlan((threshold,) * len(routers.layers)))


def asked(drafter: MixtureOfDepths) -> list[Request]:
    return [Request(prompt, COUNT, drafter) for prompt in prompts(6, seed=4)]


def packed(body: NativeBody) -> Decoder:
    model = build(torch.bfloat16, num_layers=LAYERS, seed=3).requires_grad_(False)
    pack_decoder(model, body)
    return model


def test_routers_that_learnt_nothing_decode_plainly(base) -> None:
    model = base(torch.bfloat16, num_layers=LAYERS)
    texts = [plain_text(model, prompt, COUNT) for prompt in prompts(6, seed=4)]
    drafter = mixture(model, -1.0, noise=0.0)
    for result, text in zip(
        finish(Session(model, num_slots=3, capacity=64, chunk=8), asked(drafter)), texts, strict=True
    ):
        assert result.tokens == text.new
        assert result.stats.exit_layers == [LAYERS] * COUNT


@pytest.mark.parametrize("threshold", [-1e9, 0.0, 1e9])
def test_a_batch_says_what_each_says_alone(base, threshold) -> None:
    model = base(torch.bfloat16, num_layers=LAYERS)
    drafter = mixture(model, threshold)
    together = finish(Session(model, num_slots=3, capacity=64, chunk=8), asked(drafter), every=2)
    alone = [finish(Session(model, num_slots=1, capacity=64, chunk=8), [one])[0] for one in asked(drafter)]
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    layers = {layer for r in together for layer in r.stats.exit_layers}
    assert layers == ({LAYERS} if threshold < 0 else {LAYERS // 2}) if threshold else len(layers) > 1


def test_exact_calls_are_padded_where_rows_skip(base, monkeypatch) -> None:
    """Rows that only leave keys and values in a layer do so in calls of one number of rows, and the text stays."""
    model, runs, rows = base(torch.bfloat16, num_layers=LAYERS), [], set()
    project = Layer.project

    def recorded(self: Layer, h: torch.Tensor, step: Step) -> torch.Tensor:
        if step.chunk is None:
            rows.add(len(h))
        return project(self, h, step)

    for row_count in (1, 16):
        session = Session(model, num_slots=3, capacity=64, chunk=8, row_count=row_count)
        runs.append([r.tokens for r in finish(session, asked(mixture(model, 0.0)))])
        monkeypatch.setattr(Layer, "project", recorded)
    assert rows == {16}
    assert runs[0] == runs[1]


def test_native_kernels_say_the_same(body: NativeBody) -> None:
    model = packed(body)
    drafter = mixture(model, 0.0)
    runs = [finish(Session(model, num_slots=slots, capacity=64, chunk=8), asked(drafter)) for slots in (1, 4)]
    assert [r.tokens for r in runs[0]] == [r.tokens for r in runs[1]]
    reference = build(torch.bfloat16, num_layers=LAYERS, seed=3).requires_grad_(False)
    shut, opened = mixture(model, 1e9, noise=0.0), mixture(reference, 1e9, noise=0.0)
    found = finish(Session(model, num_slots=2, capacity=64, chunk=8), asked(shut))
    expected = finish(Session(reference, num_slots=2, capacity=64, chunk=8), asked(opened))
    assert [r.stats.exit_layers for r in found] == [r.stats.exit_layers for r in expected]


@torch.no_grad()
def test_training_form_is_decoding_form(base) -> None:
    """The residuals at the top of a text whose first four tokens are the prompt, routed by the same thresholds."""
    model = base(torch.float32, num_layers=LAYERS)
    drafter = mixture(model, 0.0)
    routers, text = drafter.traversal.routers, [5, 17, 3, 80, 9, 41, 2, 66, 30, 12]
    step = Step.dense(1, len(text))
    answers, below = torch.arange(len(text)) >= 3, 0
    h = model.embed(torch.tensor(text), step)
    for place, layer in enumerate(routers.layers):
        h = model.run(h, step, below, layer)
        r = routers.logit(place, h)
        h, below = routed(model, layer, h, step, (r > 0) | ~answers, r, answers), layer + 1
    h = model.run(h, step, below)
    cache = model.new_cache(1, 64)
    for tokens, chunk in ((text[:3], True), *(([token], False) for token in text[3:])):
        passed = drafter.traversal.run(model, Draft.committed_only({0: tokens}), cache, chunk=chunk)
        if not chunk:
            torch.testing.assert_close(passed.hidden[0], h[cache.lengths[0]], atol=2e-4, rtol=2e-4)
        cache.commit([0], [range(len(tokens))])


def test_the_largest_of_every_answer_go_through() -> None:
    answers = torch.tensor([[False, True, True, True, True, False], [False, False, True, True, True, True]])
    r = torch.tensor([[9.0, 1, 4, 2, 3, 9], [-9.0, 0, 1, 1, 1, 2]]).reshape(-1)
    half = largest(r, answers, 0.5).view(2, 6).int().tolist()
    assert half == [[1, 0, 1, 0, 1, 1], [1, 1, 1, 0, 0, 1]]
    assert bool(largest(r, answers, 1.0).all())
    assert largest(r, answers, 0.3).view(2, 6)[0].int().tolist() == [1, 0, 1, 0, 1, 1]


@torch.no_grad()
def test_thresholds_let_the_stated_share_through(base) -> None:
    model = base(torch.float32, num_layers=LAYERS)
    torch.manual_seed(3)
    for capacity in (0.25, 0.5, 1.0):
        routers = noisy(DepthRouters(ModConfig(2, capacity), model.config), torch.float32, 0.3)
        tokens = torch.randint(0, 97, (8, 40), generator=torch.Generator().manual_seed(1))
        texts = TokenBatch(tokens, torch.arange(40).expand(8, 40) >= 4)
        plan = thresholds_on(model, routers, [texts])
        step, answers = Step.dense(8, 40), torch.nn.functional.pad(texts.scored[:, 1:], (0, 1)).reshape(-1)
        h = model.run(model.embed(tokens.reshape(-1), step), step, 0, 1)
        shares = (routers.logit(0, h)[answers] > plan.thresholds[0]).float().mean()
        assert abs(float(shares) - capacity) < 0.01


def test_the_share_falls_and_a_resumed_run_knows_where_it_was(base) -> None:
    objective = RECIPE.objective(base(torch.float32, num_layers=LAYERS))
    shares = []
    for _ in range(6):
        shares.append(objective.capacity)
        objective.updated()
    assert shares == [1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    again = RECIPE.objective(base(torch.float32, num_layers=LAYERS))
    again.restore(objective.state())
    assert again.capacity == 0.5
    with torch.no_grad():
        assert RECIPE.objective(base(torch.float32, num_layers=LAYERS)).capacity == 0.5


def test_a_trained_mixture_decodes_with_fewer_layers(checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    notes: list[str] = []
    outcome = train_whole(RECIPE, WORDS, tmp_path / "mixed", Lines(notes.append), checkpoint)
    assert outcome.progress.step == 6
    assert any("50% go through above" in note for note in notes)
    engine = vivace.load(tmp_path / "mixed")
    result = engine.generate("aka", method="mod", max_new_tokens=24)[0]
    assert 2 <= min(result.stats.exit_layers) < 4
    assert "mod" in engine.methods.ready()
    with pytest.raises(NotFoundError, match="vivace train mod"):
        vivace.load(checkpoint).generate("aka", method="mod")
    with pytest.raises(ConfigError, match="mod drafts nothing"):
        engine.generate("aka", method="mod", num_draft_tokens=3)


def test_a_killed_run_ends_with_the_same_weights(checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    """The share that goes through falls on from where it was."""
    decoder = replace(RECIPE.decoder, stages=(replace(STAGE, loop=SNAPSHOTS),))
    recipe, quiet = replace(RECIPE, decoder=decoder), Lines(lambda _: None)
    train_whole(recipe, WORDS, tmp_path / "whole", quiet, checkpoint)
    with pytest.raises(KeyboardInterrupt):
        train_whole(recipe, WORDS, tmp_path / "cut", Killed(), checkpoint)
    train_whole(recipe, WORDS, tmp_path / "cut", quiet, checkpoint)
    for part in ("model.safetensors", "adapters/mod/config.json", "adapters/mod/adapter_model.safetensors"):
        written, again = ((tmp_path / name / part).read_bytes() for name in ("whole", "cut"))
        assert written == again


def test_steps_lower_the_loss_and_teach_the_routers(checkpoint: Path) -> None:  # noqa: F811
    engine = vivace.load(checkpoint, dtype="float32", kernels="torch")
    model = engine.model.requires_grad_(True)
    torch.manual_seed(0)
    objective = RECIPE.objective(model)
    params = [p for group in objective.groups() for p in group["params"]]
    optimiser = torch.optim.Adam(params, lr=0.003)
    losses, router_losses = [], []
    for _ in range(8):
        optimiser.zero_grad()
        losses.append(0.0)
        for loss, seen in objective.losses(model, batch(engine)):
            loss.backward()
            losses[-1] += seen.get("loss", 0.0)
            router_losses += [seen["router_loss"]] if "router_loss" in seen else []
        assert all(p.grad is not None for p in params)
        optimiser.step()
        objective.updated()
    assert losses[-1] < losses[0]
    assert min(router_losses[4:]) < 0.7


def test_what_cannot_be_is_refused(base) -> None:
    model = base(torch.float32, num_layers=LAYERS)
    with pytest.raises(ConfigError, match="2 thresholds for 3 routed layers"):
        MixtureOfDepths(DepthRouters(ModConfig(2), model.config), ModPlan((0.0, 0.0)))
    with pytest.raises(ConfigError, match="a model of 6 layers has no such layer"):
        DepthRouters(ModConfig(7), model.config)
    with pytest.raises(ConfigError, match="every must be at least 2"):
        ModConfig(1)
    with pytest.raises(ConfigError, match="mod trains in one stage"):
        replace(RECIPE, decoder=replace(RECIPE.decoder, stages=(STAGE, STAGE)))
    with pytest.raises(ConfigError, match="router_weight above 0"):
        replace(RECIPE, router_weight=0.0)
