"""Products of bfloat16 in float32: the exact rounding of what float32 gives, forward and backward, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.test_row_invariance import cancelling, normal
from vivace.kernels import widened
from vivace.kernels.reference import any_order, attend_chunk, linear

BF16 = torch.bfloat16
Product = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def gradients() -> Iterator[None]:
    with torch.inference_mode(False), torch.enable_grad():
        yield


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without products of bfloat16."""
    monkeypatch.setattr(widened, "multiplies_bfloat16", lambda: False)


PRODUCTS: dict[str, Product] = {
    "linear": lambda x, w: linear(x, w),
    "with a bias": lambda x, w: linear(x, w, w[:, 0] * 0 + 1),
    "a matrix": lambda x, w: x @ w.mT,
    "batches": lambda x, w: x.view(4, -1, x.shape[1]) @ w.mT,
    "sums of products": lambda x, w: torch.einsum("ti,oi->to", x, w),
}


def computed(product: Product, x: Tensor, w: Tensor) -> list[Tensor]:
    """The result and the gradients of its sum of squares."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = product(x, w)
    weights = normal(*y.shape, dtype=BF16, seed=4).to(y)
    (y * weights).sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    return [y.detach(), x.grad, w.grad]


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("name", PRODUCTS)
def test_what_float32_gives_rounded_once(name: str) -> None:
    x, w = cancelling(64, 512, 96, BF16)
    with any_order():
        found = computed(PRODUCTS[name], x, w)
    wide = computed(PRODUCTS[name], x.float(), w.float())
    for got, expected in zip(found, wide, strict=True):
        assert got.dtype == BF16
        near = (got.float() - expected).abs() <= 2**-8 * expected.abs() + 1e-5 * expected.abs().mean()
        assert near.all()


@pytest.mark.usefixtures("without")
def test_weights_of_float32_under_autocast() -> None:
    """Their gradients stay in float32."""
    x, w = normal(64, 512), normal(96, 512, seed=1)
    with torch.autocast("cpu", BF16), any_order():
        found = computed(PRODUCTS["linear"], x, w)
    y = F.linear(x.bfloat16().float(), w.bfloat16().float())
    assert torch.equal(found[0], y.bfloat16())
    assert [part.dtype for part in found] == [BF16, torch.float32, torch.float32]


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("length", [40, 600])
def test_attention(length: int) -> None:
    q, k, v = (normal(2, length, 4, 16, dtype=BF16, seed=seed) for seed in (1, 2, 3))

    def attended(dtype: torch.dtype) -> list[Tensor]:
        rows = [
            part.detach().to(dtype, copy=True).requires_grad_() for part in (q, k.transpose(1, 2), v.transpose(1, 2))
        ]
        out = attend_chunk(rows[0], rows[1], rows[2], None, scale=0.25)
        out.float().square().sum().backward()
        return [out.detach(), *(row.grad for row in rows if row.grad is not None)]

    with any_order():
        found = attended(BF16)
    for got, expected in zip(found, attended(torch.float32), strict=True):
        assert got.dtype == BF16
        assert (got.float() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_that_is_only_read_is_rounded_once_too(is_causal: bool) -> None:
    """Prompts and sources: nothing is learnt there, and nobody asks for any order."""
    q, k, v = (normal(2, 40, 4, 16, dtype=BF16, seed=seed) for seed in (1, 2, 3))
    mask = None if is_causal else normal(4, 40, 40, dtype=BF16, seed=4)
    rows, wide = (
        [q, k.transpose(1, 2), v.transpose(1, 2)],
        [q.float(), k.transpose(1, 2).float(), v.transpose(1, 2).float()],
    )
    with torch.no_grad():
        found = attend_chunk(*rows, mask, scale=0.25)
        expected = attend_chunk(*wide, None if mask is None else mask.float(), scale=0.25)
    assert torch.equal(found, expected.bfloat16())


@pytest.mark.usefixtures("without")
def test_other_numbers_stay() -> None:
    x, w = normal(64, 512), normal(96, 512, seed=1)
    for dtype in (torch.float32, torch.float64):
        with any_order():
            found = computed(PRODUCTS["linear"], x.to(dtype), w.to(dtype))
        assert all(map(torch.equal, found, computed(PRODUCTS["linear"], x.to(dtype), w.to(dtype))))


def test_a_processor_with_products_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    dispatch = widened._Widened.__torch_dispatch__
    monkeypatch.setattr(
        widened._Widened,
        "__torch_dispatch__",
        lambda self, func, *rest: (seen.append(func), dispatch(self, func, *rest))[1],
    )
    x, w = normal(4, 16, dtype=BF16), normal(8, 16, dtype=BF16, seed=1)
    for has_products in (True, False):
        monkeypatch.setattr(widened, "multiplies_bfloat16", lambda has=has_products: has)
        with any_order():
            linear(x, w)
        assert bool(seen) is not has_products
    monkeypatch.undo()
    found = torch.cpu.get_capabilities()
    if found.get("architecture") == "x86_64":
        assert widened.multiplies_bfloat16() == bool(found["avx512_bw"] or found["avx_ne_convert"])
