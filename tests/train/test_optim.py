"""AdamW is torch's; Muon's update is orthogonal, cut by cut; masters keep what bfloat16 rounds away."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vivace.errors import ConfigError, MismatchError
from vivace.train.optim import Optimiser, OptimiserConfig, orthogonalise


def _grad(p: Tensor, seed: int) -> None:
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p.dtype)


def test_adamw_is_the_one_of_torch() -> None:
    ours, theirs = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))
    config = OptimiserConfig(adamw_rate=0.01, weight_decay=0.1)
    mine = Optimiser([{"params": [ours]}], config)
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(7):
        _grad(ours, step)
        _grad(theirs, step)
        mine.update(1.0)
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(16, 32), (32, 16), (16, 16)])
def test_muon_moves_in_every_direction_alike(shape: tuple[int, int]) -> None:
    p = nn.Parameter(torch.zeros(shape))
    _grad(p, 3)
    Optimiser([{"params": [p], "method": "muon"}], OptimiserConfig(muon_rate=1.0)).update(1.0)
    values = torch.linalg.svdvals(p.detach()) / max(1.0, shape[0] / shape[1]) ** 0.5
    assert values.min() > 0.4
    assert values.max() < 1.3
    assert 0.75 < float(values.mean()) < 1.1


def test_projections_stacked_in_a_weight_are_turned_one_by_one() -> None:
    stacked, alone = nn.Parameter(torch.zeros(24, 16)), nn.Parameter(torch.zeros(8, 16))
    _grad(stacked, 5)
    assert stacked.grad is not None
    alone.grad = stacked.grad[16:].clone()
    config = OptimiserConfig(muon_rate=1.0)
    Optimiser([{"params": [stacked], "method": "muon", "cuts": [(16, 8)]}], config).update(1.0)
    Optimiser([{"params": [alone], "method": "muon"}], config).update(1.0)
    torch.testing.assert_close(stacked[16:], alone, rtol=0.03, atol=0.01)


def test_small_updates_are_not_lost_in_bfloat16() -> None:
    p = nn.Parameter(torch.full((4, 4), 100.0, dtype=torch.bfloat16))
    optimiser = Optimiser([{"params": [p]}], OptimiserConfig(adamw_rate=0.01))
    for _ in range(60):
        p.grad = torch.ones_like(p)
        optimiser.update(1.0)
    assert p.dtype == torch.bfloat16
    assert abs(float(p.detach()[0, 0]) - 99.4) < 0.3
    assert optimiser.num_bytes() == 3 * 16 * 4


def test_muon_writes_its_masters_back_to_bfloat16() -> None:
    p = nn.Parameter(torch.zeros(8, 16, dtype=torch.bfloat16))
    _grad(p, 0)
    optimiser = Optimiser([{"params": [p], "method": "muon"}], OptimiserConfig())
    optimiser.update(1.0)
    assert p.detach().abs().max() > 0
    assert torch.equal(p.detach(), optimiser.state()["parts"][0]["masters"][0].bfloat16())


def test_the_factor_scales_both_methods_and_gradients_are_cleared() -> None:
    for method in ("muon", "adamw"):
        p, q = nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(8, 8))
        for weight, factor in ((p, 1.0), (q, 0.25)):
            _grad(weight, 1)
            Optimiser([{"params": [weight], "method": method}], OptimiserConfig()).update(factor)
            assert weight.grad is None
        torch.testing.assert_close(q * 4, p)


def test_clipping_bounds_the_global_norm() -> None:
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))
    p.grad, q.grad = torch.full((3,), 3.0), torch.full((4,), 4.0)
    found = Optimiser([{"params": [p, q]}], OptimiserConfig()).clip(1.0)
    assert abs(found - (27 + 64) ** 0.5) < 1e-4
    assert abs(float(torch.cat((p.grad, q.grad)).norm()) - 1) < 1e-4


def test_orthogonalise_keeps_the_directions() -> None:
    x = torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    close = orthogonalise(x, 5).float() @ (u @ v).mT
    assert (close.diagonal(dim1=1, dim2=2) > 0.5).all()


def test_nonsense_is_refused() -> None:
    p = nn.Parameter(torch.zeros(4, 4))
    for groups in ([], [{"params": [p]}, {"params": [p]}], [{"params": [p], "method": "sgd"}]):
        with pytest.raises(ConfigError):
            Optimiser(groups, OptimiserConfig())
    with pytest.raises(ConfigError, match="cut"):
        Optimiser([{"params": [p], "method": "muon", "cuts": [(2, 1)]}], OptimiserConfig())
    with pytest.raises(ConfigError, match="positive"):
        OptimiserConfig(muon_rate=0)
    saved = Optimiser([{"params": [p]}], OptimiserConfig()).state()
    with pytest.raises(MismatchError, match="resume with the recipe"):
        Optimiser([{"params": [nn.Parameter(torch.zeros(2, 4))]}], OptimiserConfig()).restore(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"newton_schulz_steps": 0}, "newton_schulz_steps must be at least 1, found 0"),
        ({"momentum_steps": -1}, "momentum_steps must be at least 0, found -1"),
        ({"muon_rate": float("nan")}, "learning rates must be positive and finite"),
        ({"adamw_rate": float("inf")}, "learning rates must be positive and finite"),
        ({"weight_decay": float("nan")}, "weight_decay must be at least 0 and finite, found nan"),
    ],
)
def test_settings_with_which_nothing_learns_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimiserConfig(**changes)  # type: ignore[arg-type]
