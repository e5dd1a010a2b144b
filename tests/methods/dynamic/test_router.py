"""Routers: scores of a token depend on nothing but itself; thresholds: calibration to a stated agreement."""

from __future__ import annotations

import pytest
import torch

from tests.methods.dynamic.gated import GATES, make_weights, text_batch
from vivace.decode.depth import ExitThresholds
from vivace.errors import ConfigError
from vivace.methods.dynamic.gates import GateConfig, GatesConfig
from vivace.methods.dynamic.objective import RouterTraining, Trails, fit_router, router_loss, trails_of
from vivace.methods.dynamic.router import ArlaRouter, RouterConfig, make_router
from vivace.methods.dynamic.thresholds import Scores, calibrate, exit_shares, exits, score_all

KINDS = ("arla", "linear", "mlp", "gap", "cosine")
NARROW = GatesConfig((GateConfig(2), GateConfig(4)))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_score_does_not_depend_on_other_tokens(deep, kind) -> None:
    """The order of the tokens, and which of them are asked about, changes no score."""
    model = deep(torch.float32)
    config = RouterConfig(kind, latent=8, stride=1)
    torch.manual_seed(1)
    router = make_router(config, NARROW, model.config.width)
    for parameter in router.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    trail = torch.randn(9, 2, model.config.width)
    order = torch.randperm(9)
    score = router.score(1, trail, lambda: model.head(trail[:, -1]))
    shuffled = router.score(1, trail[order], lambda: model.head(trail[order, -1]))
    alone = router.score(1, trail[3:4], lambda: model.head(trail[3:4, -1]))
    torch.testing.assert_close(score[order], shuffled)
    torch.testing.assert_close(score[3:4], alone)
    assert score.shape == (9,)
    assert len(set(score.tolist())) == 9


@torch.no_grad()
def test_arla_is_its_equations() -> None:
    torch.manual_seed(2)
    router, trail = ArlaRouter([3], 10, 4), torch.randn(5, 3, 10)
    score = router(0, trail, lambda: torch.empty(0))
    for row, states in enumerate(trail):
        c = [
            s / s.square().mean().add(1e-6).sqrt() @ router.down[0][n] + router.depth[0][n]
            for n, s in enumerate(states)
        ]
        queries, keys, values = router.mix[0].split(4, 1)
        weights = torch.softmax(torch.stack([(c[2] @ queries) @ (one @ keys) / 2 for one in c]), 0)
        context = sum(w * (one @ values) for w, one in zip(weights, c, strict=True))
        expected = torch.cat((c[2], context)) @ router.read[0] + router.bias[0]
        torch.testing.assert_close(score[row], expected, atol=1e-5, rtol=1e-5)


def test_depths_are_counted_from_the_gate() -> None:
    gates = GatesConfig((GateConfig(6), GateConfig(11)))
    assert RouterConfig(stride=2).depths(gates, 0) == (2, 4, 6)
    assert RouterConfig(stride=2).depths(gates, 1) == (7, 9, 11)
    assert RouterConfig(stride=9).depths(gates, 1) == (11,)
    with pytest.raises(ConfigError, match="cosine"):
        make_router(RouterConfig("cosine", stride=9), gates, 8)
    for wrong in ({"kind": "oracle"}, {"latent": 0}, {"stride": 0}):
        with pytest.raises(ConfigError):
            RouterConfig(**wrong)


@pytest.mark.parametrize(("kind", "fall"), [("arla", 0.7), ("linear", 0.9), ("mlp", 0.7)])
def test_a_router_learns_when_its_gates_are_right(deep, kind, fall) -> None:
    model = deep(torch.float32)
    weights = make_weights(model, router=RouterConfig(kind, latent=16, stride=1))
    gates = {name: value.clone() for name, value in weights.gates.state_dict().items()}
    batches = [text_batch(seed) for seed in range(3)]
    trails = Trails.join([trails_of(model, weights.gates, weights.config.router, batch) for batch in batches])
    before = float(router_loss(model, weights.router, trails).detach())
    fit_router(model, weights.router, trails, RouterTraining(epochs=20, positions=100, rate=0.02))
    assert float(router_loss(model, weights.router, trails).detach()) < fall * before
    assert all(torch.equal(value, gates[name]) for name, value in weights.gates.state_dict().items())


def test_a_router_without_weights_is_left_alone(deep) -> None:
    model = deep(torch.float32)
    weights = make_weights(model, router=RouterConfig("gap", stride=1))
    trails = trails_of(model, weights.gates, weights.config.router, text_batch(0))
    fit_router(model, weights.router, trails, RouterTraining())
    assert score_all(model, weights.router, trails).score.min() >= 0
    for wrong in ({"epochs": 0}, {"positions": 0}, {"rate": 0.0}):
        with pytest.raises(ConfigError):
            RouterTraining(**wrong)


@torch.no_grad()
def test_labels_are_agreement_with_the_whole_model(deep) -> None:
    model = deep(torch.float32)
    weights, batch = make_weights(model), text_batch(0)
    trails = trails_of(model, weights.gates, weights.config.router, batch)
    assert trails.agrees.shape == (8 * 20, 3)
    assert [len(t) for t in trails.states] == [160] * 3
    assert [t.shape[1] for t in trails.states] == [2, 2, 1]
    assert 0 < float(trails.agrees[:, 2].float().mean()) < 1
    other = trails_of(model, weights.gates, weights.config.router, text_batch(1))
    scores = score_all(model, weights.router, Trails.join([trails, other]))
    assert torch.equal(scores.agrees[:160], trails.agrees)
    assert scores.score.shape == (320, 3)
    torch.testing.assert_close(scores.score[:160], score_all(model, weights.router, trails).score)


def noisy_scores(count: int = 4000) -> Scores:
    generator = torch.Generator().manual_seed(0)
    score = torch.rand(count, 2, generator=generator)
    return Scores(score, torch.rand(count, 2, generator=generator) < 0.5 + 0.5 * score)


@pytest.mark.parametrize("quality", [0.8, 0.9, 0.95])
def test_thresholds_keep_the_stated_agreement_and_waste_nothing(quality) -> None:
    scores = noisy_scores()
    plan = calibrate(scores, quality)
    left = exits(scores, plan)
    for gate in range(2):
        out = left == gate
        assert int(out.sum()) >= 50
        assert float(scores.agrees[out, gate].double().mean()) >= quality
        waiting = left >= gate
        lower = waiting & (scores.score[:, gate] > plan.thresholds[gate] - 0.05)
        assert float(scores.agrees[lower, gate].double().mean()) < quality, "a lower threshold would have done"
    assert exit_shares(scores, plan)[0] == pytest.approx(float((left == 0).double().mean()))


def test_more_agreement_means_fewer_exits() -> None:
    """A higher threshold lets fewer tokens leave."""
    scores = noisy_scores()
    shares = [sum(exit_shares(scores, calibrate(scores, quality))) for quality in (0.8, 0.9, 0.95, 0.97)]
    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) == 4
    counts = [int((exits(scores, ExitThresholds(0.5, (t, t))) < 2).sum()) for t in (-1.0, 0.2, 0.5, 0.9, 1.1)]
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (4000, 0)


def test_a_gate_that_cannot_keep_it_stays_shut() -> None:
    agrees = torch.zeros(500, 2, dtype=torch.bool)
    agrees[:, 1] = True
    scores = Scores(torch.linspace(0, 1, 500)[:, None].repeat(1, 2), agrees)
    plan = calibrate(scores, 0.9)
    assert plan.thresholds[0] is None
    assert exit_shares(scores, plan) == [0.0, 1.0]
    few = Scores(scores.score[:40], scores.agrees[:40])
    assert calibrate(few, 0.9).thresholds == (None, None)


def test_a_gate_whose_companions_cost_more_than_its_exits_save_stays_shut() -> None:
    """24 layers: six layers of companions (.3 of a row each) are paid by .1, .15 and .3 of the tokens asked."""
    assert GatesConfig().minimum_exit_share(24) == pytest.approx((0.1, 0.15, 0.3))
    score = torch.linspace(0, 1, 1000)[:, None].repeat(1, 3)
    agrees = torch.stack([score[:, 0] > 0.7, score[:, 0] > 0.6, score[:, 0] > 0.2], 1)
    scores = Scores(score, agrees)
    assert [share > 0 for share in exit_shares(scores, calibrate(scores, 0.99))] == [True] * 3
    plan = calibrate(scores, 0.99, minimum_exit_share=(0.1, 0.15, 0.3))
    assert plan.thresholds[1] is None, "a tenth of the tokens leaves there, a seventh of those asked"
    assert exit_shares(scores, plan)[2] > 0.4


def test_equal_scores_leave_together_or_not_at_all() -> None:
    score = torch.tensor([[0.9]] * 100 + [[0.5]] * 100)
    agrees = torch.tensor([[True]] * 150 + [[False]] * 50)
    assert exit_shares(Scores(score, agrees), calibrate(Scores(score, agrees), 0.8)) == [0.5]
    assert exit_shares(Scores(score, agrees), calibrate(Scores(score, agrees), 0.7)) == [1.0]
    with pytest.raises(ConfigError, match="quality"):
        calibrate(Scores(score, agrees), 1.5)
    assert GATES.layers == (2, 4, 5)
