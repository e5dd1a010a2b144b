"""Rounding a matrix: what each method loses, and that least squares, damping and odd inputs behave."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vivace.kernels.coded import PaletteCodes, RowCodes, packed_bits, stacked, unpacked_bits
from vivace.kernels.palette import BITS
from vivace.palette.rounding import METHODS, output_error, round_matrix


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated(rows: int, width: int, seed: int = 1) -> Tensor:
    """Inputs of a few directions, some much larger than others."""
    sizes = torch.logspace(-1, 1, width)
    return (
        normal(rows, width // 2, seed=seed) @ normal(width // 2, width, seed=seed + 1) + normal(rows, width)
    ) * sizes


def moments_of(x: Tensor) -> Tensor:
    return x.T @ x / len(x)


@pytest.mark.parametrize("has_scales", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_methods_in_order(bits: int, has_scales: bool) -> None:
    """By the error of outputs: weighted clusters beat unweighted ones and even steps, and GPTQ beats them all."""
    weight, x = normal(48, 128) * 0.05, correlated(800, 128)
    h = moments_of(x)
    ways = {
        "even": {"method": "rtn"},
        "plain": {"method": "kmeans"},
        "weighted": {"method": "kmeans", "importance": h.diagonal()},
        "gptq": {"method": "gptq", "moments": h},
    }
    made = {name: round_matrix(weight, bits, has_scales=has_scales, **way) for name, way in ways.items()}
    lost = {name: output_error(weight, one, h) for name, one in made.items()}
    assert lost["plain"] < 1.1 * lost["even"]
    assert lost["weighted"] < (1.05 if bits == 4 else 1.0) * lost["plain"]
    assert lost["gptq"] < 0.7 * lost["weighted"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(16, 8), (32, 72), (48, 200)], ids=str)
def test_few_values(method: str, shape: tuple[int, int]) -> None:
    """Each tile of sixteen outputs has at most 2^bits values, before scales; more bits lose less."""
    weight, h = normal(*shape), moments_of(normal(300, shape[1], seed=3))
    errors = []
    for bits in BITS:
        made = round_matrix(weight, bits, method, importance=h.diagonal(), moments=h, has_scales=False)
        tiles = made.dense().view(-1, 16 * shape[1])
        assert all(len(tile.unique()) <= 2**bits for tile in tiles)
        errors.append(float((made.dense() - weight).square().sum()))
    assert errors == sorted(errors, reverse=True)
    whole = round_matrix(weight, 8, method)
    assert isinstance(whole, RowCodes)
    assert float((whole.dense() - weight).square().sum()) < errors[-1]


@pytest.mark.parametrize("method", METHODS)
def test_extremes(method: str) -> None:
    """Zeros, a dead input, an output of zeros and an outlier; nothing becomes infinite."""
    weight, x = normal(32, 128) * 0.02, normal(200, 128, seed=2)
    x[:, 5] = 0
    weight[3], weight[:, 7], weight[0, 0] = 0, 0, 50
    h = moments_of(x)
    made = round_matrix(weight, 3, method, importance=h.diagonal(), moments=h)
    dense = made.dense()
    assert torch.isfinite(dense).all()
    assert (dense[3] == 0).all() or dense[3].abs().max() < 0.05
    assert abs(float(dense[0, 0]) - 50) < 10


def test_one_huge_input_does_not_blur_the_others() -> None:
    """With inputs a thousand times larger at one place, the others are still rounded for their correlations."""
    weight, x = normal(32, 64) * 0.05, correlated(500, 64)
    x[:, 9] *= 1000
    h = moments_of(x)
    made, plain = (round_matrix(weight, 3, method, moments=h, importance=h.diagonal()) for method in ("gptq", "kmeans"))
    rest = torch.arange(64) != 9
    others = h[rest][:, rest]
    errors = [(weight - one.dense())[:, rest] for one in (made, plain)]
    lost = [float((error @ others * error).sum()) for error in errors]
    assert lost[0] < lost[1]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("width", [1, 5, 8, 24, 33])
def test_strings_of_bits(bits: int, width: int) -> None:
    codes = torch.randint(2**bits, (7, width), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    string = packed_bits(codes, bits) if bits < 8 else codes
    assert string.shape == (7, -(-width * bits // 8))
    assert torch.equal(unpacked_bits(string, bits, width), codes)


def test_the_order_of_bits() -> None:
    """The worked example of coremltools' palettes: 0, 3, 2, 1, 3 at two bits are the bytes 0b01101100, 0b00000011."""
    assert packed_bits(torch.tensor([[0, 3, 2, 1, 3]], dtype=torch.uint8), 2).tolist() == [[0b01101100, 0b00000011]]


def test_stacks() -> None:
    """Codes of different bits below each other are the same weights; what cannot be stacked is None."""
    parts = [round_matrix(normal(16 * n, 72, seed=n), bits, "kmeans") for n, bits in ((1, 2), (3, 4), (2, 3))]
    whole = stacked(parts)
    assert isinstance(whole, PaletteCodes)
    assert whole.bits == 4
    assert torch.equal(whole.dense(), torch.cat([part.dense() for part in parts]))
    assert torch.equal(whole.packed().dense(), whole.dense())
    assert torch.equal(whole.rows(16, 64).dense(), whole.dense()[16:64])
    eight = [round_matrix(normal(16, 72), 8, "rtn"), round_matrix(normal(5, 72), 8, "rtn")]
    found = stacked(eight)
    assert found is not None
    assert torch.equal(found.packed().dense(), torch.cat([part.dense() for part in eight]))
    assert stacked([parts[0], eight[0]]) is None
    assert stacked([round_matrix(normal(8, 72), 3, "kmeans"), parts[0]]) is None
    assert stacked([parts[0], round_matrix(normal(16, 72), 2, "kmeans", has_scales=False)]) is None
