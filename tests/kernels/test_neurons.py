"""The native feed-forward over neurons, held against PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vivace.kernels.native import NativeBody


@pytest.mark.parametrize(("count", "width", "rows"), [(1, 16, 1), (5, 40, 2), (67, 96, 3), (300, 1040, 1)])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_it_adds_what_the_neurons_send(body: NativeBody, count: int, width: int, rows: int, activation: str) -> None:
    draw = torch.Generator().manual_seed(count)
    records = torch.randn(count + 3, 3, width, generator=draw).bfloat16()
    records[count:] = torch.nan
    parts = dict(zip(("gate", "up", "down"), records[:count].unbind(1), strict=True))
    x = torch.randn(rows, width, generator=draw).bfloat16()
    out = torch.full((rows, width), 7.0)
    body.add_neurons(parts, x, out, activation)
    gate, up, down = parts.values()
    inner = getattr(F, activation)(F.linear(x, gate)) * F.linear(x, up)
    expected = 7 + inner.float() @ down.float()
    assert (out - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.parametrize(("count", "width", "rows"), [(1, 16, 1), (67, 96, 3), (300, 1040, 2)])
def test_activations_that_are_known_need_no_gate(body: NativeBody, count: int, width: int, rows: int) -> None:
    draw = torch.Generator().manual_seed(count)
    records = torch.randn(count + 3, 2, width, generator=draw).bfloat16()
    known = torch.randn(rows, count, generator=draw).bfloat16()
    known[:, ::3] = 0
    records[:count][(known == 0).all(0)] = torch.nan  # what is zero in every row is not touched
    records[count:] = torch.nan
    parts = dict(zip(("up", "down"), records[:count].unbind(1), strict=True))
    x = torch.randn(rows, width, generator=draw).bfloat16()
    out = torch.full((rows, width), 7.0)
    body.add_neurons(parts, x, out, "silu", known)
    inner = known * F.linear(x, parts["up"].nan_to_num())
    expected = 7 + inner.float() @ parts["down"].nan_to_num().float()
    assert (out - expected).abs().max() < 0.01 * expected.abs().max()
    for row in range(rows):
        alone = torch.full((1, width), 7.0)
        body.add_neurons(parts, x[row : row + 1], alone, "silu", known[row : row + 1])
        assert torch.equal(alone[0], out[row])


def test_rows_and_threads_change_no_bits(body: NativeBody) -> None:
    draw = torch.Generator().manual_seed(0)
    records, x = (torch.randn(*shape, generator=draw).bfloat16() for shape in ((200, 3, 1024), (5, 1024)))
    parts = dict(zip(("gate", "up", "down"), records.unbind(1), strict=True))
    threads, found = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            out, alone = torch.zeros(5, 1024), torch.zeros(1, 1024)
            body.add_neurons(parts, x, out, "relu")
            body.add_neurons(parts, x[3:4], alone, "relu")
            assert torch.equal(out[3:4], alone)
            found.append(out)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
