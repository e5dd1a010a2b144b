"""What is no number stays none: kernels must not make a plausible number of what a damaged weight has spoilt."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.test_grid_codes import laid, random_grid
from tests.kernels.test_low_bit import normal
from vivace.kernels.low_bit import Rounded, multiply, quantise
from vivace.kernels.native import Matrix, NativeBody

OUTS, INS = 40, 200


def matrix_of(kind: str) -> Rounded:
    if kind in ("int8", "q4"):
        return quantise(normal(OUTS, INS, seed=1), kind)  # type: ignore[arg-type]
    return laid(random_grid(kind, OUTS, INS, 32))


@pytest.mark.parametrize("spoilt", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["int8", "q4", "q4_0", "q4_k", "awq"])
def test_rows_that_are_quantized(body: NativeBody, kind: str, spoilt: float) -> None:
    weight, x = matrix_of(kind), normal(7, INS)
    expected = multiply(x, weight)
    for row, place in ((1, 0), (3, 77), (5, INS - 1)):
        x[row, place] = spoilt
    got: Tensor = body.linear(Matrix(weight, None, INS, OUTS), x)
    assert got[1::2].isnan().any(1)[:3].all()
    assert torch.equal(got.isnan(), multiply(x, weight).isnan())
    assert torch.equal(got[::2], expected[::2])  # rows beside them are as before


def test_relu(body: NativeBody) -> None:
    x = torch.tensor([[math.nan, -math.nan, -math.inf, math.inf, -0.0, 0.0, -1.0, 2.0] * 5]).bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        own = body.of(dtype)
        assert own is not None
        got = own.activate(x.to(dtype), None, "relu")
        assert torch.equal(got.isnan(), x.isnan())
        assert torch.equal(got.nan_to_num(), F.relu(x.to(dtype)).nan_to_num())


def test_neurons(body: NativeBody) -> None:
    records, x = normal(70, 3, 48), normal(2, 48)
    x[1, :2], records[:, 0, 0], records[:, 0, 1] = math.inf, 1, -1  # gates of inf - inf, which has the sign bit
    parts = dict(zip(("gate", "up", "down"), records.unbind(1), strict=True))
    out = torch.zeros(2, 48)
    body.add_neurons(parts, x, out, "relu")
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
