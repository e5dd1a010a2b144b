"""Bfloat16 in twelve bits: every bit comes back, and products are those of the dense formats to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vivace.kernels.exact import Exact, pack_exact
from vivace.kernels.low_bit import multiply, quantise, size_of
from vivace.kernels.native import Matrix, NativeBody, pack
from vivace.kernels.reference import linear

FORMATS = ("exact12", "exact12_rows")
KINDS = ("normal", "rare", "many", "zeros", "bits")


def normal(*shape: int, seed: int = 0, scale: float = 0.02) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def weights(out_width: int, in_width: int, kind: str, seed: int = 1) -> Tensor:
    """Matrices whose steps all have codes, some of them, none of them, or that hold what no weight should be."""
    found = normal(out_width, in_width, seed=seed)
    flat, draw = found.view(-1), torch.Generator().manual_seed(seed)
    if kind == "rare":
        flat[:: max(1, len(flat) // 5)] *= 1e-12
    elif kind == "many":
        found *= 2.0 ** torch.randint(-30, 30, found.shape, generator=draw)
    elif kind == "zeros":
        flat[torch.randint(len(flat), (len(flat) // 2,), generator=draw)] = 0
    elif kind == "bits":
        found = torch.randint(-(2**15), 2**15, found.shape, generator=draw, dtype=torch.int16).view(torch.bfloat16)
    return found


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)


def dense(weight: Tensor, format: str) -> Tensor:
    """As the format's products lie without it."""
    return pack(weight) if format == "exact12" else weight


widths = st.one_of(st.integers(1, 70), st.sampled_from([96, 128, 200, 333]))


@settings(max_examples=80, deadline=None)
@given(outs=widths, ins=widths, kind=st.sampled_from(KINDS), format=st.sampled_from(FORMATS))
def test_every_bit_comes_back(outs: int, ins: int, kind: str, format: str) -> None:
    weight = weights(outs, ins, kind)
    kept = pack_exact(weight, format)
    assert torch.equal(bits(kept.dense()), bits(weight))
    index = torch.tensor([outs - 1, 0, outs // 2, 0])
    assert torch.equal(bits(kept.rows(index)), bits(weight[index]))


@pytest.mark.parametrize("format", FORMATS)
def test_which_steps_are_kept_whole(format: str) -> None:
    """None without need; one weight of a seventeenth upper byte takes its step, whichever of its tiles it is in."""
    powers = torch.tensor([2.0**-power for power in range(16)])
    weight = torch.cat((powers, -powers)).repeat(64, 4).bfloat16()
    assert pack_exact(weight, format).num_whole == 0
    for output in (0, 20, 40, 63) if format == "exact12" else range(4):
        odd = weight.clone()
        odd[output, 70] = 2.0**-40
        kept = pack_exact(odd, format)
        assert kept.num_whole == 1
        assert torch.equal(kept.dense(), odd)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 17), ins=widths, outs=widths, kind=st.sampled_from(KINDS[:-1]),
    format=st.sampled_from(FORMATS), bias=st.booleans(), threads=st.integers(1, 3),
)  # fmt: skip
def linear_is_that_of_bfloat16(
    body: NativeBody, rows: int, ins: int, outs: int, kind: str, format: str, bias: bool, threads: int
) -> None:
    torch.set_num_threads(threads)
    weight, offset = weights(outs, ins, kind), normal(outs, seed=3) if bias else None
    x, plus = normal(rows, ins, seed=5, scale=1), normal(rows, outs, seed=6)
    matrix = Matrix(pack_exact(weight, format), offset, ins, outs)
    same = Matrix(dense(weight, format), offset, ins, outs)
    got = body.linear(matrix, x)
    assert torch.equal(got, body.linear(same, x))
    assert torch.equal(body.linear(matrix, x, plus), body.linear(same, x, plus))
    assert torch.equal(body.greedy(matrix, x)[0], got.float().argmax(-1))
    assert torch.equal(torch.cat([body.linear(matrix, row[None]) for row in x]), got), "alone as among others"


def test_linear(body: NativeBody) -> None:
    before = torch.get_num_threads()
    linear_is_that_of_bfloat16(body)
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_gated(body: NativeBody, kind: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    both = [(weights(200, 96, kind, seed), normal(200, seed=seed)) for seed in (1, 2)]
    kept = [Matrix(pack_exact(weight), bias, 96, 200) for weight, bias in both]
    same = [Matrix(pack(weight), bias, 96, 200) for weight, bias in both]
    for rows in (1, 4, 7, 8, 12, 16):
        x = normal(rows, 96)
        assert torch.equal(body.gated(*kept, x, "silu"), body.gated(*same, x, "silu"))
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_an_embedding(body: NativeBody, kind: str) -> None:
    weight = weights(75, 70, kind)
    index = torch.tensor([74, 0, 3, 3, 41, 18])
    found = body.rows(Matrix(pack_exact(weight, "exact12_rows"), None, 70, 75), index)
    assert torch.equal(bits(found), bits(weight[index]))


def test_the_reference() -> None:
    """PyTorch's products are those of the weights as they were."""
    weight, x, offset = weights(75, 130, "rare"), normal(9, 130, seed=1, scale=1), normal(75, seed=2)
    assert torch.equal(multiply(x, pack_exact(weight), offset), linear(x, weight, offset))


def test_bytes() -> None:
    weight = normal(256, 1024)
    kept = quantise(weight, "exact12")
    assert isinstance(kept, Exact)
    assert kept.codes.nbytes == 0.75 * weight.nbytes
    assert kept.nbytes < 0.76 * weight.nbytes
    assert size_of(256, 1024, "exact12") == pack_exact(torch.ones_like(weight)).nbytes
    assert pack_exact(weights(256, 1024, "bits")).nbytes < 1.02 * weight.nbytes, "no more than it was, but for the list"
