"""Palettes: what is clustered, what is kept without loss, and that every body multiplies as with bfloat16 weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vivace.kernels.low_bit import multiply, quantise, size_of
from vivace.kernels.native import Matrix, NativeBody, pack
from vivace.kernels.palette import ENTRIES, Palette, cluster, nearest, palettize

TILE = 16


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


widths = st.one_of(st.integers(1, 70), st.sampled_from([128, 200, 333]))


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 17), ins=widths, outs=widths, bias=st.booleans(), threads=st.integers(1, 3))
def linear_is_that_of_bfloat16(body: NativeBody, rows: int, ins: int, outs: int, bias: bool, threads: int) -> None:
    torch.set_num_threads(threads)
    weight, offset = palettize(normal(outs, ins, seed=1)), normal(outs, seed=3) if bias else None
    x, plus = normal(rows, ins, seed=5), normal(rows, outs, seed=6)
    matrix = Matrix(weight, offset, ins, outs)
    same = Matrix(pack(weight.dense().bfloat16()), offset, ins, outs)
    got = body.linear(matrix, x)
    assert torch.equal(got, body.linear(same, x))
    assert torch.equal(body.linear(matrix, x, plus), plus + got)
    assert torch.equal(body.greedy(matrix, x)[0], got.float().argmax(-1))
    assert torch.equal(torch.cat([body.linear(matrix, row[None]) for row in x]), got), "alone as among others"


def test_linear(body: NativeBody) -> None:
    before = torch.get_num_threads()
    linear_is_that_of_bfloat16(body)
    torch.set_num_threads(before)


def test_the_reference(body: NativeBody) -> None:
    """Both are the weights that are meant, in float64, up to the sizes of the sums."""
    weight, x, offset = palettize(normal(75, 130)), normal(9, 130, seed=1), normal(75, seed=2)
    exact = x.double() @ weight.dense().double().T + offset.double()
    sizes = x.double().abs() @ weight.dense().double().abs().T + offset.double().abs()
    for got in (multiply(x, weight, offset), body.linear(Matrix(weight, offset, 130, 75), x)):
        assert ((got.double() - exact).abs() <= exact.abs() * 2.0**-8 + sizes * 1e-6).all()


def test_gated(body: NativeBody) -> None:
    gate, up = (Matrix(palettize(normal(70, 96, seed=seed)), normal(70, seed=seed), 96, 70) for seed in (1, 2))
    x = normal(7, 96, scale=0.1)
    got = body.gated(gate, up, x, "silu")
    assert torch.equal(got, body.activate(body.linear(gate, x), body.linear(up, x), "silu"))


@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (17, 65), (300, 130)], ids=str)
def test_what_is_clustered(shape: tuple[int, int]) -> None:
    weight = normal(*shape, scale=0.05)
    rounded = palettize(weight)
    dense = rounded.dense()
    assert dense.shape == shape
    error = (dense - weight.float()).square().sum() / weight.float().square().sum()
    assert error < 0.1**2
    index = torch.arange(0, shape[0], 3)
    assert torch.equal(rounded.rows(index), dense[index])
    assert rounded.nbytes == size_of(*shape, "lut4")


@pytest.mark.parametrize("num_different", [1, 2, 15, 16])
def test_palettized_weights_are_kept(num_different: int) -> None:
    """Sixteen values for sixteen outputs, other ones for the next, and their bits come back."""
    values = normal(3, num_different, seed=4)
    weight = values.repeat_interleave(TILE, 0).gather(1, torch.randint(num_different, (3 * TILE, 90)))[:40]
    weight = torch.cat((weight, values[2:, :1].expand(1, 90)))
    assert torch.equal(palettize(weight).dense().bfloat16(), weight)


def test_one_more_is_too_many() -> None:
    weight = torch.linspace(-1, 1, 17).bfloat16().repeat(16, 5)
    dense = palettize(weight).dense()
    assert not torch.equal(dense, weight.float())
    assert len(dense.unique()) <= ENTRIES


def test_clusters_are_where_no_step_of_lloyd_moves_them() -> None:
    """Each entry is about the mean of what is nearest to it; heavy tails and empty clusters included."""
    values = torch.cat((normal(4, 4000).float() ** 3, normal(1, 4000).float() ** 9))
    entries = cluster(values)
    assert (entries.diff(dim=1) >= 0).all()
    codes = nearest(values, entries).long()
    best = (values[..., None] - entries[:, None].float()).abs().amin(-1)
    assert torch.allclose(best, (values - entries.float().gather(1, codes)).abs(), rtol=0, atol=1e-6)
    for entry in range(ENTRIES):
        own = values[0][codes[0] == entry]
        assert (own.mean() - entries[0, entry].float()).abs() < 0.06 * values[0].std()


def test_it_beats_even_steps() -> None:
    weight = normal(16, 2048)
    even = torch.linspace(float(weight.min()), float(weight.max()), ENTRIES)[None]
    flat = weight.float().view(1, -1)
    lost = (flat - even.gather(1, nearest(flat, even).long())).square().mean()
    assert (palettize(weight).dense() - weight.float()).square().mean() < 0.6 * lost


def test_a_format_among_others() -> None:
    assert isinstance(quantise(normal(20, 30), "lut4"), Palette)
