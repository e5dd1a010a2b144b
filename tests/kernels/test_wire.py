"""Rows in four bits: native code and reference agree in every bit, and both keep the method's promises."""

from __future__ import annotations

import pytest
import torch

from vivace.kernels.library import found_library
from vivace.kernels.wire import FACTORS, REACH, WireCode

KINDS = (torch.float32, torch.bfloat16)
SIZES = [(576, 10), (48, 2), (64, 64), (32, 0), (2, 0)]


def code_of(width: int, kept: int, *, has_factors: bool, ranks: int = 3) -> WireCode:
    """A code with random features kept and steps of very different sizes."""
    numbers = torch.Generator().manual_seed(width)
    is_kept = torch.zeros(width, dtype=torch.bool)
    is_kept[torch.randperm(width, generator=numbers)[:kept]] = True
    steps = 2 ** (4 * torch.rand(ranks + 1, width - kept, generator=numbers) - 6)
    return WireCode(is_kept.nonzero().squeeze(1), (~is_kept).nonzero().squeeze(1), steps, has_factors)


def rows_of(seed: int, width: int, kind: torch.dtype, count: int = 40) -> torch.Tensor:
    """Rows of sizes from 1e-5 to 1e3, one of them all zero."""
    numbers = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, width, generator=numbers) * torch.logspace(-5, 3, count)[:, None]
    rows[7] = 0
    return rows.to(kind)


@pytest.mark.skipif(found_library() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_factors", [True, False])
@pytest.mark.parametrize(("width", "kept"), SIZES)
def test_native_code_gives_the_bits_of_the_reference(
    width: int, kept: int, has_factors: bool, kind: torch.dtype
) -> None:
    code = code_of(width, kept, has_factors=has_factors)
    payloads = []
    for source in range(4):
        rows = rows_of(source, width, kind)
        payload, clipped = code.encode(rows, source)
        expected, counted = code.reference_encode(rows, source)
        assert torch.equal(payload, expected)
        assert clipped == counted
        payloads.append(payload)
    assert torch.equal(code.add(payloads[:3]), code.reference_add(payloads[:3]))
    assert torch.equal(code.add(payloads[3:], 3), code.reference_add(payloads[3:], 3))


@pytest.mark.parametrize("has_factors", [True, False])
def test_bytes_are_those_of_the_formula(has_factors: bool) -> None:
    code = code_of(576, 10, has_factors=has_factors)
    payload, _ = code.encode(rows_of(0, 576, torch.bfloat16), 0)
    assert payload.shape == (40, (576 - 10) // 2 + 2 * 10 + has_factors)
    bits = 8 * code.row_bytes / 576
    assert bits == pytest.approx((16 * 10 + 4 * 566 + 8 * has_factors) / 576)
    assert bits <= 4.25


def test_every_byte_comes_back() -> None:
    code = WireCode(torch.arange(0), torch.arange(512), torch.ones(3, 512), False)
    payload = torch.arange(256, dtype=torch.uint8)[None]
    again, clipped = code.encode(code.add([payload]), 0)
    assert torch.equal(again, payload)
    assert clipped == 0


def test_errors_stay_within_half_a_step_and_what_is_beyond_is_counted() -> None:
    code = code_of(576, 10, has_factors=False)
    inside = (2 * torch.rand(30, 576, generator=torch.Generator().manual_seed(1)) - 1) * 7.4
    step = torch.ones(576)
    step[code.rest] = code.scales[1]
    rows = inside * step
    payload, clipped = code.encode(rows, 1)
    decoded = code.add([payload], 1)
    assert clipped == 0
    assert bool(((decoded - rows).abs()[:, code.rest] <= code.scales[1] / 2 * 1.0001).all())
    assert torch.equal(code.encode(decoded, 1)[0], payload), "what was rounded stays as it is"
    rows[:, code.rest[3]] = 40 * code.scales[1, 3]
    payload, clipped = code.encode(rows, 1)
    assert clipped == 30
    assert torch.equal(code.add([payload], 1)[:, code.rest[3]], (7 * code.scales[1, 3]).expand(30))


def test_the_sum_is_as_near_as_all_halves_of_steps() -> None:
    code = code_of(576, 10, has_factors=False)
    parts = []
    for rank in range(3):
        rows = torch.zeros(9, 576)
        numbers = torch.Generator().manual_seed(rank)
        rows[:, code.rest] = (2 * torch.rand(9, 566, generator=numbers) - 1) * 7 * code.scales[rank]
        parts.append(rows)
    found = code.add([code.encode(rows, rank)[0] for rank, rows in enumerate(parts)])
    error = (found - sum(parts)).abs()[:, code.rest]
    assert bool((error <= code.scales[:3].sum(0) / 2 * 1.0001).all())


def test_with_all_features_kept_numbers_travel_in_bfloat16() -> None:
    code = WireCode(torch.arange(64), torch.arange(0), torch.ones(3, 0), True)
    parts = [rows_of(rank, 64, torch.float32) for rank in (0, 1)]
    found = code.add([code.encode(part, rank)[0] for rank, part in enumerate(parts)])
    assert torch.equal(found, parts[0].bfloat16().float() + parts[1].bfloat16().float())


def test_a_feature_that_is_never_anything_gives_no_infinity() -> None:
    code = WireCode(torch.arange(0), torch.arange(4), torch.full((2, 4), 1e-8), True)
    rows = torch.tensor([[0.0, 0, 0, 0], [0, 1, 0, 0], [1e30, 0, 0, 0]])
    assert bool(code.add([code.encode(rows, 0)[0]]).isfinite().all())


def test_a_factor_follows_the_size_of_a_row() -> None:
    """The error of a row is a share of its size, whatever that is; with steps alone small rows are lost."""
    steps = torch.full((2, 256), 0.1)
    numbers = torch.randn(60, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 2, 60)[:, None]
    errors = []
    for has_factors in (True, False):
        code = WireCode(torch.arange(0), torch.arange(256), steps, has_factors)
        found = code.add([code.encode(numbers, 0)[0]])
        errors.append((found - numbers).norm(dim=1) / numbers.norm(dim=1))
    assert float(errors[0].max()) < 0.15
    assert float(errors[1].max()) > 0.9


def test_the_factor_is_the_best_of_those_tried() -> None:
    code = WireCode(torch.arange(0), torch.arange(64), torch.full((2, 64), 0.5), True)
    rows = rows_of(5, 64, torch.float32)[8:]
    payload, _ = code.encode(rows, 0)
    found = (code.add([payload]) - rows).square().sum(1)
    top = torch.searchsorted(FACTORS * REACH, (rows * 2).abs().amax(1))
    for below in range(8):
        factor = FACTORS[top - below][:, None]
        other = (rows * 2 / factor).clamp(-8, 7).round() * factor * 0.5
        assert bool((found <= (other - rows).square().sum(1) * (1 + 1e-4)).all())
