"""Figures of early exits, against counts by hand."""

from __future__ import annotations

import pytest
import torch

from benchmarks.exit_measures import RouterTrial, compare_routers, roc_auc, tradeoff, velocities
from tests.decode.tiny_decoders import build
from tests.methods.dynamic.gated import GATES, make_weights, text_batch
from vivace.errors import ConfigError
from vivace.evaluate.systems import MethodSystem
from vivace.methods.dynamic.objective import RouterTraining, trails_of
from vivace.methods.dynamic.router import RouterConfig
from vivace.methods.dynamic.thresholds import Scores
from vivace.train.distillation import FrozenPass


def test_roc_auc_counts_pairs() -> None:
    torch.manual_seed(0)
    score, label = torch.randint(0, 6, (40,)).float(), torch.rand(40) < 0.4
    wins = [
        1.0 if yes > no else 0.5 if yes == no else 0.0 for yes in score[label].tolist() for no in score[~label].tolist()
    ]
    assert roc_auc(score, label) == pytest.approx(sum(wins) / len(wins))
    assert roc_auc(label.float(), label) == 1.0
    assert roc_auc(-label.float(), label) == 0.0
    assert roc_auc(score, torch.ones(40, dtype=torch.bool)) is None


def test_an_entrant_may_state_an_agreement() -> None:
    stated = [MethodSystem(name, None, 8).quality for name in ("plain", "dynamic", "dynamic@0.98")]  # type: ignore[arg-type]
    assert stated == [None, None, 0.98]
    with pytest.raises(ConfigError, match=r"'dynamic@much': a quality is a number"):
        _ = MethodSystem("dynamic@much", None, 8).quality  # type: ignore[arg-type]


def test_a_tradeoff_counts_exits_on_other_positions() -> None:
    score = torch.linspace(0, 1, 400)[:, None].repeat(1, 3)
    known = Scores(score, torch.stack([score[:, 0] > 0.5, score[:, 0] > 0.25, score[:, 0] > -1], 1))
    found = tradeoff(known, known, 0.99, GATES, 6)
    assert sum(found.exit_shares) == pytest.approx(1.0)
    assert found.exit_agreement == found.agreement
    assert found.agreement >= 0.99
    layers = sum(share * layer for share, layer in zip(found.exit_shares, GATES.layers, strict=True))
    assert found.mean_layers == pytest.approx(layers)
    wrong = Scores(score, torch.zeros(400, 3, dtype=torch.bool))
    shut = tradeoff(wrong, known, 0.9, GATES, 6)
    assert (shut.exit_agreement, shut.agreement, shut.mean_layers) == (None, 1.0, 6.0)
    assert tradeoff(known, wrong, 0.99, GATES, 6).agreement == 0.0


def test_routers_are_compared_on_the_same_positions() -> None:
    model = build(torch.float32, num_layers=6, seed=3).requires_grad_(False)
    weights = make_weights(model)
    one, other = (trails_of(model, weights.gates, weights.config.router, text_batch(seed)) for seed in (0, 1))
    configs = [RouterConfig(kind, latent=8, stride=1) for kind in ("arla", "linear", "gap")]
    found = compare_routers(
        *(model, weights.gates, configs, RouterTrial(one, other, one)),
        lesson=RouterTraining(epochs=60, positions=80, rate=0.02),
        qualities=(0.7, 0.9),
    )
    rows = [row for row, _ in found]
    assert [row.kind for row in rows] == ["arla", "linear", "gap"]
    assert rows[2].num_weights == 0 < rows[1].num_weights < rows[0].num_weights
    for row in rows[:2]:
        assert all(area is not None and area > 0.8 for area in row.auc), "learnt on the very positions that count"
        assert [t.quality for t in row.tradeoffs] == [0.7, 0.9]
    with pytest.raises(ConfigError, match="one stride"):
        compare_routers(
            *(model, weights.gates, [RouterConfig(stride=1), RouterConfig(stride=2)], RouterTrial(one, one, one)),
            lesson=RouterTraining(),
            qualities=(0.9,),
        )


@torch.no_grad()
def test_velocity_is_what_residuals_do() -> None:
    """The top is the top; an untrained accelerated stream is the slow one in its interval."""
    model = build(torch.float32, num_layers=6, seed=3).requires_grad_(False)
    weights = make_weights(model)
    slow, fast = velocities(model, weights.gates, [text_batch(0), text_batch(1)])
    assert slow.depths == (1, 2, 3, 4, 5, 6)
    assert (slow.cosine[-1], slow.agreement[-1]) == (pytest.approx(1.0), 1.0)
    for gate, stream in enumerate(fast):
        start, stop = GATES.interval(gate)
        assert stream.depths == tuple(range(start + 1, stop + 1))
        assert stream.cosine == pytest.approx(slow.cosine[start:stop], abs=1e-5)
        assert stream.step == pytest.approx(slow.step[start:stop], abs=1e-4)
        assert stream.agreement == pytest.approx(slow.agreement[start:stop], abs=0.02)
    one, rows = FrozenPass.of(model, text_batch(0).tokens, (2, 3)), text_batch(0).predicting
    step = (one.residuals[3] - one.residuals[2])[rows].norm(dim=-1) / one.residuals[2][rows].norm(dim=-1)
    alone, _ = velocities(model, weights.gates, [text_batch(0)])
    assert alone.step[2] == pytest.approx(float(step.mean()), abs=1e-4)
