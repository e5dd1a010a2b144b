"""A file's codes: nothing of them is lost, and every body multiplies as the reference does."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.test_low_bit import extremes, normal
from vivace.kernels.grid import Grid, stacked
from vivace.kernels.grid_codes import TABLES, GridCodes, grid_codes
from vivace.kernels.library import AVX2_WITHOUT_VNNI, runnable
from vivace.kernels.low_bit import multiply
from vivace.kernels.native import Matrix, NativeBody

KINDS = {
    "q4_0": (-8, 7, None, None, False),
    "q4_k": (0, 15, None, "units", False),
    "q4_1": (0, 15, None, "halves", False),
    "awq": (0, 15, "each", None, False),
    "gptq-ordered": (0, 15, "same", None, True),
    "q6_k": (-32, 31, None, None, False),
    "mlx-8": (0, 255, None, "floats", False),
    "gptq-8": (0, 255, "each", None, True),
    "int8": (-128, 127, None, None, False),
    "iq4": (-127, 113, None, None, False),
}
"""Least and largest code, zeros, offsets, and whether inputs are in another order."""


def random_grid(kind: str, outs: int, ins: int, group: int, seed: int = 0) -> Grid:
    """Random codes with scales of both signs, some zero."""
    torch.manual_seed(seed)
    low, high, zeros, offsets, is_ordered = KINDS[kind]
    count = -(-ins // group)
    codes = torch.randint(low, high + 1, (outs, ins)).to(torch.uint8 if low >= 0 else torch.int8)
    if kind == "iq4":
        codes = torch.tensor(TABLES[2], dtype=torch.int8)[torch.randint(0, 16, (outs, ins))]
    codes.view(-1)[:2] = torch.tensor([low, high]).to(codes.dtype)[: codes.numel()]
    scales = (
        torch.randn(outs, count).half().float() * 0.1 if kind == "int8" else torch.randn(outs, count).half().float()
    )
    scales[0] = 0
    units = None
    offset = torch.randn(outs, count)
    if kind in ("q4_k", "q6_k") and group < 256:
        wide = -(-ins // 256)
        units = torch.randn(outs, wide).half().float()
        each = units.repeat_interleave(256 // group, 1)[:, :count]
        scales = each * torch.randint(-32, 64, (outs, count))
        offset = each * torch.randint(0, 64, (outs, count))
    found = {"same": torch.full((outs, count), 8.0), "each": torch.randint(0, high // 2 + 2, (outs, count)).float()}
    return Grid(
        codes,
        scales,
        group,
        None if zeros is None else found[zeros],
        None if offsets is None else offset.half().float() if offsets == "halves" else offset,
        units,
        units if offsets == "units" else None,
        torch.randperm(ins) if is_ordered else None,
    )


def laid(grid: Grid) -> GridCodes:
    found = grid_codes(grid)
    assert found is not None
    return found


@pytest.mark.parametrize("group", [16, 32, 64, 128, 576, 48])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost(kind: str, group: int) -> None:
    for outs, ins in ((40, 576), (16, 64), (1, 100), (33, 320)):
        grid = random_grid(kind, outs, ins, group)
        codes = laid(grid)
        expected = grid.dense()
        assert torch.equal(codes.dense(), expected)
        index = torch.tensor([0, outs - 1, outs // 2])
        assert torch.equal(codes.rows(index), expected[index])
        assert codes.format == ("grid4" if kind in ("q4_0", "q4_k", "q4_1", "awq", "gptq-ordered", "iq4") else "grid8")


def test_what_has_no_place_is_left_to_be_decoded() -> None:
    grid = random_grid("q4_0", 32, 96, 24)
    assert grid_codes(grid) is None  # groups of 24
    wide = random_grid("awq", 32, 96, 32)
    assert grid_codes(Grid(wide.codes, wide.scales, 32, wide.scales * 0 + torch.tensor([0.0, 1.0, 300.0]))) is None


def test_bytes_are_near_those_of_the_file() -> None:
    for kind, group, bits in (("q4_0", 32, 4.5), ("q4_1", 32, 5.0), ("q4_k", 32, 4.5), ("q6_k", 16, 6.5625)):
        codes = laid(random_grid(kind, 1024, 1024, group))
        share = codes.nbytes * 8 / 1024**2 / bits
        assert share < (1.05 if kind != "q6_k" else 1.31), (kind, share)


@pytest.mark.parametrize("kinds", [("q4_0", "q4_0"), ("q4_k", "q6_k"), ("q4_1", "awq"), ("mlx-8", "q4_0")])
def test_stacked_grids_are_the_same_weights(kinds: tuple[str, str]) -> None:
    grids = [random_grid(kind, 32, 320, group) for kind, group in zip(kinds, (32, 16), strict=True)]
    whole = stacked(grids)
    assert whole is not None
    assert torch.equal(whole.dense(), torch.cat([each.dense() for each in grids]))
    found = grid_codes(whole)
    assert found is None or torch.equal(found.dense(), whole.dense())
    assert torch.equal(whole.rows(16, 48).dense(), whole.dense()[16:48])


def test_grids_in_different_orders_are_not_stacked() -> None:
    one, other = (random_grid("gptq-ordered", 32, 64, 32, seed=seed) for seed in (1, 2))
    assert stacked([one, other]) is None
    assert stacked([one, one]) is not None
    assert stacked([random_grid("q4_0", 16, 96, 24), random_grid("q4_0", 16, 96, 16)]) is None


widths = st.one_of(st.integers(1, 70), st.sampled_from([128, 200, 256, 333, 512]))


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 17), ins=widths, outs=st.integers(1, 70), kind=st.sampled_from(sorted(KINDS)),
    group=st.sampled_from([16, 32, 64, 128, 1024]), bias=st.booleans(), threads=st.integers(1, 3),
)  # fmt: skip
def linear_is_the_reference(
    body: NativeBody, rows: int, ins: int, outs: int, kind: str, group: int, bias: bool, threads: int
) -> None:
    torch.set_num_threads(threads)
    weight, offset = laid(random_grid(kind, outs, ins, group)), normal(outs, seed=3) if bias else None
    matrix = Matrix(weight, offset, ins, outs)
    x, plus = extremes(rows, ins, 5), normal(rows, outs, seed=6)
    expected = multiply(x, weight, offset)
    got = body.linear(matrix, x)
    assert torch.equal(got, expected)
    assert torch.equal(body.linear(matrix, x, plus), plus + got)
    assert torch.equal(body.greedy(matrix, x)[0], got.float().argmax(-1))
    assert torch.equal(torch.cat([body.linear(matrix, row[None]) for row in x]), got), "alone as among others"
    tokens = torch.arange(outs)
    assert torch.equal(body.rows(matrix, tokens), weight.dense().bfloat16())


def test_linear(body: NativeBody) -> None:
    before = torch.get_num_threads()
    linear_is_the_reference(body)
    torch.set_num_threads(before)


def test_linear_without_vnni(library: ctypes.CDLL) -> None:
    """Pairs of products in sixteen bits, also with codes of -128, as processors without the dot product sum them."""
    if "avx2" not in runnable(library):
        pytest.skip("this processor does not run the avx2 kernels")
    masked = NativeBody("avx2", library)
    masked._index = AVX2_WITHOUT_VNNI
    before = torch.get_num_threads()
    linear_is_the_reference(masked)
    torch.set_num_threads(before)
    codes = torch.full((16, 128), -128, dtype=torch.int8)
    weight, x = laid(Grid(codes, torch.ones(16, 1), 128)), torch.full((2, 128), 3.0).bfloat16()
    for sign in (1, -1):
        assert torch.equal(masked.linear(Matrix(weight, None, 128, 16), sign * x), multiply(sign * x, weight))


def test_products_are_near_those_of_the_weights() -> None:
    for kind in KINDS:
        grid = random_grid(kind, 64, 320, 32)
        x: Tensor = normal(4, 320)
        exact = x.float() @ grid.dense().t()
        error = (multiply(x, laid(grid)).float() - exact).norm() / exact.norm()
        assert error < 0.012, (kind, error)
