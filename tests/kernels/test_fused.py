"""The Triton kernels on a GPU: what PyTorch computes in float32, whatever the shapes. Run with ``-m gpu``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vivace.kernels import fused, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not fused.can_compile(torch.device("cuda")), reason="no GPU, or no Triton"
    ),
]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Largest relative difference: that of one rounding, and of weights that are rounded before they are multiplied."""
SHAPES = [(1, 9, 3, 64, 256), (6, 9, 3, 64, 512), (4, 4, 2, 32, 1024), (2, 8, 1, 80, 512), (3, 32, 2, 128, 64)]
"""Rows, heads, key heads, width of a head, entries."""


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.fixture(params=TOLERANCE)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@torch.inference_mode()
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "width", "entries"), SHAPES)
@pytest.mark.parametrize("shared", [True, False])
def test_attention_to_entries_wherever_they_lie(
    rows: int, heads: int, kv_heads: int, width: int, entries: int, shared: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    keys, values = (torch.randn(kv_heads, 4096, width, device="cuda").to(dtype) for _ in range(2))
    places = [torch.randperm(4096)[:entries] for _ in range(1 if shared else rows)]
    address = torch.stack(places).to("cuda")
    q = torch.randn(rows, heads + 3, width, device="cuda").to(dtype)[:, :heads]
    seen = torch.randint(1, entries, (rows, 1), device="cuda")
    visible = torch.zeros(rows, entries, dtype=dtype, device="cuda")
    visible.masked_fill_(torch.arange(entries, device="cuda") >= seen, -torch.inf)
    found = fused.attend(q, keys, values, address, visible, 0.125)
    k, v = (stored[:, address].transpose(0, 1).float().expand(rows, -1, -1, -1) for stored in (keys, values))
    grouped = q.float().view(rows, kv_heads, -1, width)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        grouped, k, v, attn_mask=visible.float()[:, None, None], scale=0.125
    )
    assert apart(found, wanted.reshape(rows, heads, width)) < TOLERANCE[dtype]


@torch.inference_mode()
def test_a_row_has_the_same_bits_however_many_entries_are_read(dtype: torch.dtype) -> None:
    """A longer neighbour, and a graph, mask further entries; so does a text that grows."""
    torch.manual_seed(0)
    keys, values = (torch.randn(3, 4096, 64, device="cuda").to(dtype) for _ in range(2))
    q, address = torch.randn(1, 9, 64, device="cuda").to(dtype), torch.arange(2048, device="cuda")[None]
    hidden = torch.arange(2048, device="cuda")[None] >= 100
    visible = torch.zeros(1, 2048, dtype=dtype, device="cuda").masked_fill_(hidden, -torch.inf)
    found = [fused.attend(q, keys, values, address[:, :n], visible[:, :n], 0.125) for n in (128, 256, 1024, 2048)]
    assert all(torch.equal(found[0], other) for other in found[1:])


@torch.inference_mode()
@pytest.mark.parametrize("shared", [True, False])
def test_more_rows_than_fit_take_several_launches(
    shared: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    keys, values = (torch.randn(3, 1024, 64, device="cuda").to(dtype) for _ in range(2))
    q = torch.randn(11, 9, 64, device="cuda").to(dtype)
    address = torch.stack([torch.randperm(1024)[:128] for _ in range(1 if shared else 11)]).to("cuda")
    visible = torch.zeros(11, 128, dtype=dtype, device="cuda")
    visible.masked_fill_(torch.arange(128, device="cuda") > 10 * torch.arange(11, device="cuda")[:, None], -torch.inf)
    whole = fused.attend(q, keys, values, address, visible, 0.125)
    monkeypatch.setattr(fused, "SUMS_AT_ONCE", 4 * 9 * 64 * 2)
    assert fused.rows_at_once(q, 128) == 4
    assert torch.equal(fused.attend(q, keys, values, address, visible, 0.125), whole)


@torch.inference_mode()
@pytest.mark.parametrize(("width", "rotated"), [(64, 64), (80, 32), (128, 128)])
def test_rotation(width: int, rotated: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 14, width, device="cuda").to(dtype)[:, :12]
    cos, sin = (torch.randn(5, 1, rotated, device="cuda").to(dtype) for _ in range(2))
    wanted = reference.rotate(x.float(), cos.float(), sin.float())
    assert apart(fused.rotate(x, cos, sin), wanted) < TOLERANCE[dtype]


@torch.inference_mode()
def test_storing_is_exact(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stored = [torch.randn(3, 512, 64, device="cuda").to(dtype) for _ in range(2)]
    wanted = [each.clone() for each in stored]
    rows = torch.randn(5, 15, 64, device="cuda").to(dtype)
    keys, values, address = rows[:, 9:12], rows[:, 12:], torch.randperm(512, device="cuda")[:5]
    fused.store(keys, values, address, *stored)
    for whole, part in zip(wanted, (keys, values), strict=True):
        whole.index_copy_(1, address, part.transpose(0, 1))
    assert all(map(torch.equal, stored, wanted))
