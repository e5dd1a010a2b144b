"""Palettes: what is clustered, what is kept without loss, and that every body multiplies as the formats say."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vivace.kernels.library import AVX2_WITHOUT_VNNI, GROUP, runnable
from vivace.kernels.low_bit import multiply, quantise, size_of
from vivace.kernels.native import Matrix, NativeBody, pack
from vivace.kernels.palette import (
    BITS,
    IntPalette,
    Palette,
    cluster,
    int_palette_of,
    lloyd,
    nearest,
    num_bytes,
    palette_of,
    palettize,
)

TILE = 16


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def known(outs: int, ins: int, bits: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Codes, of which each occurs, and the tile of each output."""
    codes = torch.randint(2**bits, (outs, ins), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return codes, torch.arange(outs) // TILE


def integers(outs: int, ins: int, bits: int, seed: int = 0) -> tuple[IntPalette, Tensor]:
    """A palette of integers up to both ends, with the weights that are meant."""
    generator = torch.Generator().manual_seed(seed)
    codes, tile = known(outs, ins, bits, seed)
    entries = torch.randint(-127, 128, (int(tile[-1]) + 1, 2**bits), generator=generator)
    entries[:, 0], entries[:, -1] = -127, 127
    entries = entries.sort(1).values.to(torch.int8)
    scales = torch.randn(outs, -(-ins // GROUP), generator=generator).bfloat16()
    scales[0] = 0
    meant = entries[tile].gather(1, codes.long()).float() * scales.float().repeat_interleave(GROUP, 1)[:, :ins]
    return int_palette_of(codes, entries, scales), meant


widths = st.one_of(st.integers(1, 70), st.sampled_from([128, 200, 333]))


@settings(max_examples=90, deadline=None)
@given(
    rows=st.integers(1, 17), ins=widths, outs=widths, bits=st.sampled_from(BITS), bias=st.booleans(),
    threads=st.integers(1, 3),
)  # fmt: skip
def linear_is_that_of_bfloat16(
    body: NativeBody, rows: int, ins: int, outs: int, bits: int, bias: bool, threads: int
) -> None:
    torch.set_num_threads(threads)
    weight, offset = palettize(normal(outs, ins, seed=1), bits), normal(outs, seed=3) if bias else None
    x, plus = normal(rows, ins, seed=5), normal(rows, outs, seed=6)
    matrix = Matrix(weight, offset, ins, outs)
    same = Matrix(pack(weight.dense().bfloat16()), offset, ins, outs)
    got = body.linear(matrix, x)
    assert torch.equal(got, body.linear(same, x))
    assert torch.equal(body.linear(matrix, x, plus), plus + got)
    assert torch.equal(body.greedy(matrix, x)[0], got.float().argmax(-1))
    assert torch.equal(torch.cat([body.linear(matrix, row[None]) for row in x]), got), "alone as among others"


@settings(max_examples=90, deadline=None)
@given(
    rows=st.integers(1, 17), ins=widths, outs=widths, bits=st.sampled_from(BITS), bias=st.booleans(),
    threads=st.integers(1, 3),
)  # fmt: skip
def linear_is_the_reference(
    body: NativeBody, rows: int, ins: int, outs: int, bits: int, bias: bool, threads: int
) -> None:
    torch.set_num_threads(threads)
    weight, offset = integers(outs, ins, bits)[0], normal(outs, seed=3) if bias else None
    x, plus = normal(rows, ins, seed=5), normal(rows, outs, seed=6)
    matrix = Matrix(weight, offset, ins, outs)
    got = body.linear(matrix, x)
    assert torch.equal(got, multiply(x, weight, offset))
    assert torch.equal(body.linear(matrix, x, plus), plus + got)
    assert torch.equal(body.greedy(matrix, x)[0], got.float().argmax(-1))
    assert torch.equal(torch.cat([body.linear(matrix, row[None]) for row in x]), got), "alone as among others"


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_linear(body: NativeBody) -> None:
    linear_is_that_of_bfloat16(body)


@pytest.mark.usefixtures("threads")
def test_integers(body: NativeBody) -> None:
    linear_is_the_reference(body)


@pytest.mark.usefixtures("threads")
def test_integers_without_vnni(library: ctypes.CDLL) -> None:
    if "avx2" not in runnable(library):
        pytest.skip("this processor does not run the avx2 kernels")
    masked = NativeBody("avx2", library)
    masked._index = AVX2_WITHOUT_VNNI
    linear_is_the_reference(masked)


@pytest.mark.parametrize("bits", BITS)
def test_the_reference(body: NativeBody, bits: int) -> None:
    """Both are the weights that are meant, in float64, up to the sizes of the sums."""
    weight, x, offset = palettize(normal(75, 130), bits), normal(9, 130, seed=1), normal(75, seed=2)
    exact = x.double() @ weight.dense().double().T + offset.double()
    sizes = x.double().abs() @ weight.dense().double().abs().T + offset.double().abs()
    for got in (multiply(x, weight, offset), body.linear(Matrix(weight, offset, 130, 75), x)):
        assert ((got.double() - exact).abs() <= exact.abs() * 2.0**-8 + sizes * 1e-6).all()


@pytest.mark.parametrize("bits", BITS)
def test_gated(body: NativeBody, bits: int) -> None:
    gate, up = (Matrix(palettize(normal(70, 96, seed=seed), bits), normal(70, seed=seed), 96, 70) for seed in (1, 2))
    x = normal(7, 96, scale=0.1)
    got = body.gated(gate, up, x, "silu")
    assert torch.equal(got, body.activate(body.linear(gate, x), body.linear(up, x), "silu"))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (17, 65), (300, 130)], ids=str)
def test_what_is_laid_out_comes_back(shape: tuple[int, int], bits: int) -> None:
    """Every code at its place, whatever the rows that are asked for, and the bytes that are told."""
    codes, tile = known(*shape, bits)
    entries = normal(int(tile[-1]) + 1, 2**bits, seed=3)
    meant = entries[tile].gather(1, codes.long()).float()
    laid, (ints, scaled) = palette_of(codes, entries), integers(*shape, bits)
    index = torch.arange(0, shape[0], 3)
    for found, expected, is_int in ((laid, meant, False), (ints, scaled, True)):
        assert torch.equal(found.dense(), expected)
        assert torch.equal(found.rows(index), expected[index])
        assert found.nbytes == num_bytes(*shape, bits, ints=is_int)
    assert laid.nbytes == size_of(*shape, f"lut{bits}")


@pytest.mark.parametrize("bits", BITS)
def test_what_is_clustered(bits: int) -> None:
    """The errors of the best quantizers of normal numbers (J. Max 1960) are .117, .0345 and .0095 at 2 to 4 bits."""
    weight = normal(300, 130, scale=0.05)
    error = (palettize(weight, bits).dense() - weight.float()).square().sum() / weight.float().square().sum()
    assert error < {2: 0.12, 3: 0.036, 4: 0.0105}[bits]


@pytest.mark.parametrize("num_different", [1, 2, 4, 8, 15, 16])
def test_palettized_weights_are_kept(num_different: int) -> None:
    """At most as many values as entries for sixteen outputs, other ones for the next, and their bits come back."""
    values = normal(3, num_different, seed=4)
    weight = values.repeat_interleave(TILE, 0).gather(1, torch.randint(num_different, (3 * TILE, 90)))[:40]
    weight = torch.cat((weight, values[2:, :1].expand(1, 90)))
    for bits in BITS:
        if num_different <= 2**bits:
            assert torch.equal(palettize(weight, bits).dense().bfloat16(), weight)


@pytest.mark.parametrize("bits", BITS)
def test_one_more_is_too_many(bits: int) -> None:
    weight = torch.linspace(-1, 1, 2**bits + 1).bfloat16().repeat(16, 5)
    dense = palettize(weight, bits).dense()
    assert not torch.equal(dense, weight.float())
    assert len(dense.unique()) <= 2**bits


def test_clusters_are_where_no_step_of_lloyd_moves_them() -> None:
    """Each entry is about the mean of what is nearest to it; heavy tails and empty clusters included."""
    values = torch.cat((normal(4, 4000).float() ** 3, normal(1, 4000).float() ** 9))
    entries = cluster(values)
    assert (entries.diff(dim=1) >= 0).all()
    codes = nearest(values, entries).long()
    best = (values[..., None] - entries[:, None].float()).abs().amin(-1)
    assert torch.allclose(best, (values - entries.float().gather(1, codes)).abs(), rtol=0, atol=1e-6)
    for entry in range(16):
        own = values[0][codes[0] == entry]
        assert (own.mean() - entries[0, entry].float()).abs() < 0.06 * values[0].std()


def test_what_is_important_is_kept() -> None:
    """Numbers of weight zero move no entry; a number of great weight gets one of its own."""
    values = torch.linspace(-1, 1, 400)[None]
    half = (values > 0).float()
    entries = lloyd(values, 2, half)
    inside = entries[entries > 0]
    assert torch.allclose(inside, torch.tensor([0.167, 0.5, 0.833]), atol=0.02) or len(inside) == 4
    important = torch.ones_like(values)
    important[0, 300] = 1e6
    assert (lloyd(values, 2, important) - values[0, 300]).abs().min() < 1e-3


def test_it_beats_even_steps() -> None:
    weight = normal(16, 2048)
    even = torch.linspace(float(weight.min()), float(weight.max()), 16)[None]
    flat = weight.float().view(1, -1)
    lost = (flat - even.gather(1, nearest(flat, even).long())).square().mean()
    assert (palettize(weight).dense() - weight.float()).square().mean() < 0.6 * lost


@pytest.mark.parametrize("bits", BITS)
def test_a_format_among_others(bits: int) -> None:
    found = quantise(normal(20, 30), f"lut{bits}")
    assert isinstance(found, Palette)
    assert found.bits == bits
