"""The one module of low-rank factors: nothing at first, every site in order, the file's names, and what it adds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.core.decoders import BASE
from vivace.core.config import ModelConfig
from vivace.core.low_rank import PROJECTIONS, FixedFactors, LowRank, random_factor, site_shapes

MODEL = ModelConfig(**BASE)  # type: ignore[arg-type]
RANKS = {"q": 3, "k": 0, "o": 2, "mlp": 5}


def made() -> LowRank:
    torch.manual_seed(4)
    return LowRank(site_shapes(MODEL, range(1, 3), RANKS))


def test_factors_are_drawn_in_order_and_add_nothing_until_trained() -> None:
    module = made()
    torch.manual_seed(4)
    for (layer, name), down, up in module.items():
        expected = nn.Linear(down.shape[2], down.shape[1], bias=False).weight  # drawn alike, one after the other
        assert torch.equal(down[0], expected), (layer, name)
        assert not up.any()
    y, x = torch.randn(4, MODEL.width), torch.randn(4, MODEL.width)
    before = y.clone()
    module.deltas(torch.tensor([0, 0, -1, 0])).add(y, x, (1, "mlp"))
    assert torch.equal(y, before)


def test_sites_are_those_with_a_rank_that_the_layer_has() -> None:
    assert made().sites == ((1, "q"), (1, "o"), (1, "mlp"), (2, "q"), (2, "o"), (2, "mlp"))
    heads, keys, fed = MODEL.num_heads * MODEL.head_dim, MODEL.num_kv_heads * MODEL.head_dim, MODEL.ffn_width
    width = MODEL.width
    assert site_shapes(MODEL, [0], dict.fromkeys(PROJECTIONS, 2)) == {
        (0, "q"): (width, 2, heads),
        (0, "k"): (width, 2, keys),
        (0, "v"): (width, 2, keys),
        (0, "o"): (heads, 2, width),
        **({(0, "gate"): (width, 2, fed)} if MODEL.gated else {}),
        (0, "up"): (width, 2, fed),
        (0, "down"): (fed, 2, width),
    }


@torch.inference_mode(False)
def test_it_adds_the_product_to_rows_that_carry_it_and_passes_gradients() -> None:
    module = made()
    with torch.no_grad():
        for _, _, up in module.items():
            up.normal_()
    down, up = module.down[2][0], module.up[2][0]
    x = torch.randn(3, MODEL.width)

    def added(which: list[int]) -> Tensor:
        y = torch.zeros(3, MODEL.width)
        module.deltas(torch.tensor(which)).add(y, x, (1, "mlp"))
        return y

    oracle = nn.functional.silu(x @ down.T) @ up.T
    torch.testing.assert_close(added([0, 0, 0]), oracle)
    some = added([0, -1, 0])
    assert not some[1].any()
    torch.testing.assert_close(some[0], oracle[0])
    with torch.enable_grad():
        added([0, 0, 0]).sum().backward()
    assert module.down[2].grad is not None
    assert module.down[0].grad is None


def test_what_goes_into_a_file_comes_back_in_any_precision() -> None:
    module, other = made(), made()
    with torch.no_grad():
        module.up[0].fill_(0.5)
    tensors = module.tensors()
    assert sorted(tensors) == sorted([*(f"down.{i}" for i in range(6)), *(f"up.{i}" for i in range(6))])
    assert not any(value.requires_grad for value in tensors.values())
    other.load_state_dict(tensors)
    other.bfloat16().widen()
    assert other.deltas(torch.zeros(1)).up[1, "q"].dtype == torch.float32
    assert float(other.deltas(torch.zeros(1)).up[1, "q"].mean()) == 0.5, "the factors at a site are the module's own"


@pytest.mark.parametrize("rank", [1, 7])
def test_a_random_factor_is_as_wide_as_a_linear_layers(rank: int) -> None:
    bound = 1 / math.sqrt(200)
    factor = random_factor(rank, 200)
    assert factor.shape == (rank, 200)
    assert bound * 0.8 < float(factor.abs().max()) <= bound


def test_fixed_factors_lie_in_one_piece_of_memory() -> None:
    """Also a down factor that three sites share, which is held once."""
    shared, ups = torch.randn(2, 8), [torch.randn(6, 2), torch.randn(4, 2), torch.randn(6, 2)]
    factors = {(0, name): (shared, up) for name, up in zip("qkv", ups, strict=True)}
    factors[1, "o"] = (torch.randn(3, 5).t().contiguous().t(), torch.randn(9, 3))
    held = FixedFactors.of(factors, dtype=torch.bfloat16)
    parts = [*held.down.values(), *held.up.values()]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert held.nbytes == 2 * (16 + 12 + 8 + 12 + 15 + 27) == parts[0].untyped_storage().nbytes()
    for site, (down, up) in factors.items():
        assert torch.equal(held.down[site], down[None].bfloat16())
        assert torch.equal(held.up[site], up[None].bfloat16())
