"""The native operations in float32: near float64, and a row's bits are its own."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conftest import BODIES
from tests.core.entries import in_blocks
from tests.kernels.test_native import exact_attention
from tests.kernels.test_native_bits import rows_are_their_own
from tests.kernels.test_row_invariance import normal
from vivace.kernels import reference
from vivace.kernels.library import runnable
from vivace.kernels.native import Matrix, NativeBody, narrowed, pack, unpack

ROWS = (*range(1, 24), 31, 33, 64)
WIDTHS = [(1, 5), (24, 33), (33, 16), (48, 96), (256, 777), (1100, 64)]


@pytest.fixture(params=BODIES)
def body(request: pytest.FixtureRequest, library: ctypes.CDLL) -> NativeBody:
    if request.param not in runnable(library):
        pytest.skip(f"this processor does not run the {request.param} kernels")
    found = NativeBody(request.param, library).of(torch.float32)
    assert found is not None
    return found


def close(got: Tensor, exact: Tensor, scale: Tensor | float = 1.0) -> None:
    assert got.dtype == torch.float32
    error = (got.double() - exact).abs()
    assert (error <= 2e-6 * scale + 1e-30).all(), f"off by {float((error / scale).max())}"


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_linear(body: NativeBody, widths: tuple[int, int], is_packed: bool) -> None:
    ins, outs = widths
    weight, bias = normal(outs, ins, seed=1), normal(outs, seed=2)
    if is_packed:
        assert torch.equal(unpack(pack(weight))[:outs, :ins], weight)
    m = Matrix(pack(weight) if is_packed else weight, bias, *widths)
    for rows in (1, 2, 7, 10, 11, 33):
        x, plus = normal(rows, ins, seed=5), normal(rows, outs, seed=6)
        got = body.linear(m, x)
        sizes = x.double().abs() @ weight.double().abs().T + bias.double().abs()
        close(got, x.double() @ weight.double().T + bias.double(), sizes)
        assert torch.equal(body.linear(m, x, plus), plus + got)
        tokens, values = body.greedy(m, x)
        assert torch.equal(tokens, got.argmax(-1))
        assert torch.equal(values, got.amax(-1))


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("widths", [(2, 5), (24, 33), (34, 16), (256, 777), (1100, 64)], ids=str)
def test_a_row_is_the_same_among_any_others(body: NativeBody, widths: tuple[int, int], is_packed: bool) -> None:
    rows_are_their_own(body, widths, torch.float32, is_packed, ROWS)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_weights_of_16_bits_give_the_bits_of_float32(
    body: NativeBody, widths: tuple[int, int], kind: torch.dtype, is_packed: bool
) -> None:
    ins, outs = widths
    small = normal(outs, ins, seed=1).to(kind)
    small[0, 0] = torch.finfo(kind).tiny / 4  # of float16, a number that is not normal
    whole = small.float()
    assert torch.equal(narrowed(whole), small)
    assert narrowed(whole).dtype == (torch.bfloat16 if torch.equal(whole.bfloat16().float(), whole) else kind)
    assert torch.equal(narrowed(normal(4, 4)), normal(4, 4))
    wide = Matrix(pack(whole) if is_packed else whole, None, *widths)
    narrow = Matrix(pack(small, torch.float32) if is_packed else small, None, *widths, widens=True)
    assert torch.equal(narrow.rows_of_weights(), small)
    for rows in (1, 3, 10, 25):
        x = normal(rows, ins, seed=3)
        assert torch.equal(body.linear(narrow, x), body.linear(wide, x))
        assert all(map(torch.equal, body.greedy(narrow, x), body.greedy(wide, x)))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu"])
def test_activations_and_norms(body: NativeBody, activation: str) -> None:
    x, up = torch.linspace(-30, 30, 4001)[None], normal(1, 4001)
    exact = {
        "silu": F.silu(x.double()),
        "gelu": F.gelu(x.double()),
        "gelu_tanh": F.gelu(x.double(), approximate="tanh"),
        "relu": F.relu(x.double()),
    }[activation]
    close(body.activate(x, up, activation), exact * up.double(), up.abs() * (1 + x.abs()))
    for width in (1, 7, 48, 1000):
        rows, weight = normal(5, width), normal(width, seed=1)
        for offset in (0.0, 1.0):
            expected = reference.rms_norm(rows.double(), weight.double(), 1e-6, offset)
            close(body.rms_norm(rows, weight, 1e-6, offset), expected, 1 + expected.abs())


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 16), (6, 1, 33), (3, 3, 64), (2, 1, 260)])
def test_attention(body: NativeBody, heads: int, kv_heads: int, width: int) -> None:
    entries, rows = 150, 9
    q = normal(rows, heads, width)
    keys, values = normal(3, kv_heads, entries, width, seed=1), normal(3, kv_heads, entries, width, seed=2)
    slot = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    seen = torch.tensor([1, 17, 64, 65, 130, 3, 150, 149, 100])
    stored, blocks = in_blocks(keys, values)
    how = {"window": None, "scale": width**-0.5}
    whole = body.attend_rows(q, stored, blocks, slot, seen, None, **how)
    for row in range(rows):
        at = int(slot[row])
        exact = exact_attention(q[row], keys[at], values[at], list(range(int(seen[row]))), width**-0.5, None)
        close(whole[row], exact)
        one = slice(row, row + 1)
        alone = body.attend_rows(q[one], stored, blocks, slot[one], seen[one], None, **how)
        assert torch.equal(alone[0], whole[row])
