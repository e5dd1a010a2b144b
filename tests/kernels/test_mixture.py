"""What is native around experts: who is chosen, the feed-forward in one call, and how outputs are mixed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vivace.core.config import MoeConfig
from vivace.core.cpu.packed import PackedMixture
from vivace.core.layers import Linear
from vivace.core.moe import MixtureOfExperts
from vivace.kernels.native import Matrix, NativeBody, pack


def mixture(width: int, num_experts: int, top_k: int, *, normalise: bool) -> MixtureOfExperts:
    router = Linear(width, num_experts).bfloat16()
    torch.nn.init.normal_(router.weight)
    return MixtureOfExperts(MoeConfig(num_experts, top_k, 8, normalise), router, [])


@pytest.mark.parametrize(("num_experts", "top_k"), [(5, 1), (16, 2), (64, 8), (7, 7)])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("rows", [1, 5])
def test_the_router_chooses_as_in_pytorch(
    body: NativeBody, num_experts: int, top_k: int, normalise: bool, rows: int
) -> None:
    torch.manual_seed(num_experts + rows)
    ours = mixture(48, num_experts, top_k, normalise=normalise)
    packed = PackedMixture(body, ours)
    for _ in range(10):
        x = torch.randn(rows, 48).bfloat16()
        weights, chosen = packed.choose(x)
        logits = packed.router(x).float()
        by_logit = logits.sort(stable=True, dim=-1, descending=True)[1][:, :top_k]
        assert torch.equal(chosen, by_logit), "the likeliest first, the first of equals first"
        shares = torch.softmax(logits, -1).gather(-1, by_logit)
        expected = shares / shares.sum(-1, keepdim=True) if normalise else shares
        torch.testing.assert_close(weights, expected.bfloat16(), rtol=2**-7, atol=0)


def test_a_row_is_routed_the_same_in_any_company(body: NativeBody) -> None:
    torch.manual_seed(0)
    packed = PackedMixture(body, mixture(64, 16, 2, normalise=True))
    x = torch.randn(9, 64).bfloat16()
    together = packed.choose(x)
    for row in range(9):
        alone = packed.choose(x[row : row + 1])
        assert all(torch.equal(one[0], all_[row]) for one, all_ in zip(alone, together, strict=True))


@pytest.mark.parametrize(("rows", "count", "width"), [(1, 2, 48), (4, 1, 33), (3, 8, 130)])
@pytest.mark.parametrize("is_added", [True, False])
def test_outputs_are_mixed_with_the_bits_of_pytorch(
    body: NativeBody, rows: int, count: int, width: int, is_added: bool
) -> None:
    torch.manual_seed(width)
    ours = mixture(width, count, count, normalise=True)
    each = torch.randn(rows, count, width).bfloat16()
    weights = torch.softmax(torch.randn(rows, count), -1).bfloat16()
    add = torch.randn(rows, width).bfloat16() if is_added else None
    expected = ours.mix(each.unbind(1), weights, add)
    assert torch.equal(body.mix(each.unbind(1), weights, add), expected), "rows lie apart"
    assert torch.equal(body.mix([part.contiguous() for part in each.unbind(1)], weights, add), expected)


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("is_added", [True, False])
def test_a_feed_forward_in_one_call_has_the_bits_of_two(body: NativeBody, rows: int, is_added: bool) -> None:
    torch.manual_seed(rows)

    def matrix(out_width: int, in_width: int) -> Matrix:
        return Matrix(pack(torch.randn(out_width, in_width).bfloat16()), None, in_width, out_width)

    gate, up, down = matrix(72, 40), matrix(72, 40), matrix(40, 72)
    x: Tensor = torch.randn(rows, 40).bfloat16()
    add = torch.randn(rows, 40).bfloat16() if is_added else None
    inner = body.gated(gate, up, x, "silu")
    assert torch.equal(body.feed((gate, up, down), x, "silu", add), body.linear(down, inner, add))
