"""Training: the base stays as it is, to the bit, and the exit layer learns."""

from __future__ import annotations

import pytest
import torch

from vivace.core.step import Step
from vivace.errors import ConfigError
from vivace.methods.multirate.config import MultirateConfig
from vivace.methods.multirate.objective import MultirateLoss, MultirateObjective
from vivace.methods.multirate.residual import Accelerator, dual_forward
from vivace.train.data import TokenBatch
from vivace.train.distillation import FrozenPass


def batch(seed: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 97, (8, 24), generator=generator)
    return TokenBatch(tokens, torch.arange(24).expand(8, 24) >= 4)


def objective(deep, **fields: object) -> MultirateObjective:
    torch.manual_seed(0)
    config = MultirateConfig(exit_layer=2, rank=8, bottleneck=64, **fields)
    return MultirateObjective(Accelerator(config, deep(torch.float32).config), MultirateLoss())


@pytest.mark.parametrize("fields", [{"mode": "delta"}, {"mode": "lite"}, {"feedback": True}], ids=str)
def test_training_teaches_the_gate_and_leaves_the_base(deep, fields) -> None:
    model = deep(torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    task = objective(deep, **fields)
    optimiser = torch.optim.AdamW(task.groups(), lr=3e-3)
    seen = []
    for step in range(90):
        optimiser.zero_grad()
        for loss, metrics in task.losses(model, batch(step % 4)):
            loss.backward()
            seen += [metrics] if metrics else []
        optimiser.step()
        task.updated()
    assert seen[-1]["kl"] < 0.6 * seen[0]["kl"]
    assert seen[-1]["agreement"] > seen[0]["agreement"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parts_give_the_gradient_of_the_whole(deep) -> None:
    model, gradients = deep(torch.float32), []
    for rows in (7, 4096):
        task = objective(deep)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in task.accelerator.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        task.loss = MultirateLoss(rows=rows)
        for loss, _ in task.losses(model, batch(0)):
            loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in task.accelerator.parameters()]))
    assert gradients[0].norm() > 1e-3
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_parts_of_the_loss_add_up(deep) -> None:
    model = deep(torch.float32)
    whole = objective(deep)
    torch.manual_seed(0)
    config = whole.accelerator.config
    parts = MultirateObjective(Accelerator(config, model.config), MultirateLoss(rows=7))
    total = sum(loss for loss, _ in whole.losses(model, batch(0)))
    pieces = [loss for loss, _ in parts.losses(model, batch(0))]
    assert len(pieces) == -(-8 * 20 // 7)
    torch.testing.assert_close(sum(pieces), total, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_training_rows_are_decoding_rows(deep, accelerator) -> None:
    """What is trained is what drafts: the same residual at the gate."""
    model = deep(torch.float32)
    fast = accelerator(torch.float32, noise=0.3)
    task = MultirateObjective(fast, MultirateLoss())
    tokens = batch(1).tokens[:1]
    trained = task.accelerate(model, tokens, FrozenPass.of(model, tokens))
    step = Step.dense(*tokens.shape)
    h = model.embed(tokens.reshape(-1), step)
    _, drafted = dual_forward(model, fast, h, step, torch.arange(tokens.shape[1]), None)
    torch.testing.assert_close(trained, drafted, atol=1e-5, rtol=1e-5)


def test_only_scored_positions_count() -> None:
    rows = TokenBatch(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0]]).bool())
    assert rows.predicting.tolist() == [1, 2, 4]
    assert rows.targets.tolist() == [3, 4, 6]


def test_loss_weights_are_checked() -> None:
    with pytest.raises(ConfigError):
        MultirateLoss(distillation=-1)
    with pytest.raises(ConfigError):
        MultirateLoss(temperature=0)
    with pytest.raises(ConfigError):
        MultirateLoss(max_lag=0)


def test_matrices_of_feedback_and_reach_learn_slower(deep) -> None:
    """Every weight is in one group; where there are no such matrices there is one group, as snapshots have it."""
    task = objective(deep, feedback=True, reach=(2, 3))
    weights, square = task.groups()
    names = {id(p): name for name, p in task.accelerator.named_parameters()}
    found = {names[id(p)] for p in square["params"]}
    assert found == {"feedback", *(f"reach.{at}.{what}" for at in (0, 1) for what in ("query", "output"))}
    assert square["rate"] < 0.5
    assert "rate" not in weights
    assert sorted(names) == sorted(id(p) for group in (weights, square) for p in group["params"])
    assert [group["name"] for group in objective(deep).groups()] == ["accelerator"]
