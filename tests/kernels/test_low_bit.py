"""Weights in few bits: what is rounded, how it lies, and that every body multiplies as the reference does."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vivace.errors import ConfigError
from vivace.kernels import low_bit
from vivace.kernels.library import AVX2_WITHOUT_VNNI, BODIES, runnable
from vivace.kernels.low_bit import GROUP, LowBit, check_weights, multiply, native_q4, quantise, search_q4
from vivace.kernels.native import Matrix, NativeBody

FORMATS = ("int8", "q4")


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def extremes(rows: int, width: int, seed: int) -> Tensor:
    """Rows with an outlier, a group of zeros, a row of zeros, and numbers that round to the ends."""
    x = normal(rows, width, seed=seed)
    x[:, :: max(1, width // 3)] *= 300
    x[0, : min(width, GROUP)] = 0
    if rows > 2:
        x[1] = 0
        x[2] = x[2].sign() * 3
    return x


def few_bits(out_width: int, in_width: int, format: str, seed: int = 1) -> LowBit:
    return quantise(extremes(out_width, in_width, seed), format)


widths = st.one_of(st.integers(1, 70), st.sampled_from([128, 200, 256, 333]))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 17), ins=widths, outs=widths, format=st.sampled_from(FORMATS), bias=st.booleans(),
    threads=st.integers(1, 3),
)  # fmt: skip
def linear_is_the_reference(
    body: NativeBody, rows: int, ins: int, outs: int, format: str, bias: bool, threads: int
) -> None:
    torch.set_num_threads(threads)
    weight, offset = few_bits(outs, ins, format), normal(outs, seed=3) if bias else None
    matrix = Matrix(weight, offset, ins, outs)
    x, plus = extremes(rows, ins, 5), normal(rows, outs, seed=6)
    expected = multiply(x, weight, offset)
    got = body.linear(matrix, x)
    assert torch.equal(got, expected)
    assert torch.equal(body.linear(matrix, x, plus), plus + got)
    assert torch.equal(body.greedy(matrix, x)[0], got.float().argmax(-1))
    assert torch.equal(torch.cat([body.linear(matrix, row[None]) for row in x]), got), "alone as among others"


def test_linear(body: NativeBody) -> None:
    before = torch.get_num_threads()
    linear_is_the_reference(body)
    torch.set_num_threads(before)


def test_linear_without_vnni(library: ctypes.CDLL) -> None:
    """Pairs of products in sixteen bits, as processors without the dot product sum them: the largest there are fit."""
    if "avx2" not in runnable(library):
        pytest.skip("this processor does not run the avx2 kernels")
    masked = NativeBody("avx2", library)
    masked._index = AVX2_WITHOUT_VNNI
    before = torch.get_num_threads()
    linear_is_the_reference(masked)
    torch.set_num_threads(before)
    for sign in (1, -1):
        x, weight = torch.full((2, 128), 3.0).bfloat16(), quantise(torch.full((16, 128), sign * 7.0).bfloat16(), "int8")
        x[1] *= sign
        assert torch.equal(masked.linear(Matrix(weight, None, 128, 16), x), multiply(x, weight))


@pytest.mark.parametrize("format", FORMATS)
def test_every_number_of_rows(body: NativeBody, format: str) -> None:
    """Each has code of its own where whole groups of four tiles are multiplied; the fifth tile is alone."""
    matrix, x = Matrix(few_bits(80, 150, format), None, 150, 80), extremes(20, 150, 5)
    expected = multiply(x, few_bits(80, 150, format))
    for rows in range(1, 21):
        assert torch.equal(body.linear(matrix, x[:rows]), expected[:rows]), f"{rows} rows"


@pytest.mark.parametrize("format", FORMATS)
def test_gated(body: NativeBody, format: str) -> None:
    gate, up = (Matrix(few_bits(70, 96, format, seed), normal(70, seed=seed), 96, 70) for seed in (1, 2))
    x = normal(7, 96, scale=0.1)
    got = body.gated(gate, up, x, "silu")
    assert torch.equal(got, body.activate(body.linear(gate, x), body.linear(up, x), "silu"))


@pytest.mark.parametrize("format", FORMATS)
def test_the_reference_multiplies_what_is_meant(format: str) -> None:
    """Rounded inputs times rounded weights, in float64."""
    weight = few_bits(50, 150, format)
    x = extremes(9, 150, 4)
    whole, scales = low_bit.prepare(x)
    meant = (whole.double() * scales[:, :, None].double()).view(9, -1)[:, :150]
    exact = meant @ weight.dense().double().T
    sizes = meant.abs() @ weight.dense().double().abs().T
    assert ((multiply(x, weight).double() - exact).abs() <= exact.abs() * 2.0**-8 + sizes * 1e-6).all()
    assert ((meant - x.double()).abs() <= x.double().abs().amax() / 254 + 1e-6).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (17, 65), (300, 130)], ids=str)
def test_what_is_rounded(format: str, shape: tuple[int, int]) -> None:
    """Within half a step of the weight, and rows are found one by one."""
    weight = normal(*shape, scale=0.05)
    rounded = quantise(weight, format)
    dense = rounded.dense()
    assert dense.shape == shape
    error = (dense - weight.float()).square().sum() / weight.float().square().sum()
    assert error < (0.011**2 if format == "int8" else 0.1**2)
    index = torch.arange(0, shape[0], 3)
    assert torch.equal(rounded.rows(index), dense[index])
    assert (rounded.integers() != -128).all(), "the dot product without VNNI has no room for it"


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_stay_zeros(format: str) -> None:
    weight = torch.zeros(20, 100, dtype=torch.bfloat16)
    assert not quantise(weight, format).dense().any()
    assert not multiply(torch.zeros(2, 100).bfloat16(), few_bits(20, 100, format)).any()


def test_bytes() -> None:
    weight = normal(160, 640)
    assert quantise(weight, "int8").nbytes <= 0.51 * weight.nbytes
    assert quantise(weight, "q4").nbytes <= 0.27 * weight.nbytes


def test_native_search_is_the_one_written_down(body: NativeBody, library: ctypes.CDLL) -> None:
    """Up to scales that lose the same."""
    weight = extremes(40, 256, 7)
    expected, scales = search_q4(weight)
    codes, found = native_q4(library, BODIES[body.name], weight)
    assert (found == scales).float().mean() > 0.99
    assert (codes == expected).float().mean() > 0.99


def test_the_search_beats_reaching_the_largest_weight() -> None:
    weight = normal(64, 512)
    codes, scales = search_q4(weight)
    table = torch.tensor(low_bit.TABLE).float()
    groups = weight.float().view(-1, GROUP)
    searched = (table[codes.int()].view(-1, GROUP) * scales.view(-1, 1).float() - groups).square().mean()
    reaching = groups.abs().amax(1, keepdim=True) / 127
    nearest = (groups / reaching)[..., None].sub(table).abs().argmin(-1)
    assert searched < 0.9 * (table[nearest] * reaching - groups).square().mean()


def test_names() -> None:
    assert check_weights("q4") == "q4"
    with pytest.raises(ConfigError, match="did you mean 'int8'"):
        check_weights("int9")
