"""Every native operation against float64 on random shapes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.core.entries import in_blocks
from vivace.kernels import reference
from vivace.kernels.native import Matrix, NativeBody, pack

HALF_ULP = 2.0**-8
"""Of a bfloat16 that was rounded to nearest, relative to its power of two."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def close(got: Tensor, exact: Tensor, *, slack: float = 1e-5, scale: Tensor | float = 1.0) -> None:
    """Equal but for the last rounding and ``slack`` of float32 noise."""
    error = (got.double() - exact).abs()
    assert torch.isfinite(got.float()).all()
    assert (error <= exact.abs() * HALF_ULP + slack * scale + 1e-30).all(), f"off by {float(error.max())}"


def matrix(out_width: int, in_width: int, *, packed: bool, bias: bool, seed: int = 1) -> tuple[Matrix, Tensor, Tensor]:
    """For a body, and its weights and bias in float64."""
    weight, offset = normal(out_width, in_width, seed=seed), normal(out_width, seed=seed + 1)
    made = Matrix(pack(weight) if packed else weight, offset if bias else None, in_width, out_width)
    return made, weight.double(), offset.double() * bias


widths = st.one_of(st.integers(1, 70), st.sampled_from([128, 256, 333, 640]))
few_rows = st.one_of(st.integers(1, 17), st.sampled_from([24, 33, 50]))
each_body = settings(max_examples=60, deadline=None)


@each_body
@given(rows=few_rows, ins=widths, outs=widths, packed=st.booleans(), bias=st.booleans(), threads=st.integers(1, 3))
def linear_is_exact(body: NativeBody, rows: int, ins: int, outs: int, packed: bool, bias: bool, threads: int) -> None:
    torch.set_num_threads(threads)
    m, weight, offset = matrix(outs, ins, packed=packed, bias=bias)
    x, plus = normal(rows, ins, seed=5), normal(rows, outs, seed=6)
    exact = x.double() @ weight.T + offset
    sizes = x.double().abs() @ weight.T.abs() + offset.abs()
    got = body.linear(m, x)
    close(got, exact, scale=sizes)
    assert torch.equal(body.linear(m, x, plus), plus + got)


def test_linear(body: NativeBody) -> None:
    before = torch.get_num_threads()
    linear_is_exact(body)
    torch.set_num_threads(before)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu"])
@pytest.mark.parametrize(("rows", "ins", "outs"), [(1, 48, 64), (3, 70, 37), (9, 33, 5), (16, 256, 96), (30, 64, 160)])
def test_gated(body: NativeBody, activation: str, rows: int, ins: int, outs: int) -> None:
    gate, up = (matrix(outs, ins, packed=True, bias=bool(seed), seed=seed)[0] for seed in (0, 7))
    x = normal(rows, ins, seed=5) * ins**-0.5 * 3
    g, u = body.linear(gate, x), body.linear(up, x)
    got = body.gated(gate, up, x, activation)
    assert torch.equal(got, body.activate(g, u, activation))
    wide = g.double()
    exact = {
        "silu": F.silu(wide),
        "gelu": F.gelu(wide),
        "gelu_tanh": F.gelu(wide, approximate="tanh"),
        "relu": F.relu(wide),
    }[activation]
    ones = torch.ones_like(u)
    close(body.activate(g, ones, activation), exact, slack=1e-6)
    assert torch.equal(got, body.activate(g, ones, activation) * u)
    assert torch.equal(body.activate(g, None, activation), body.activate(g, ones, activation))


def test_activations_everywhere(body: NativeBody) -> None:
    """All bfloat16 from -100 to 100, and none of them becomes a NaN."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.float().abs() <= 100]
    ones = torch.ones_like(x)
    for name, exact in {
        "silu": F.silu(x.double()),
        "gelu": F.gelu(x.double()),
        "gelu_tanh": F.gelu(x.double(), approximate="tanh"),
        "relu": F.relu(x.double()),
    }.items():
        close(body.activate(x, ones, name), exact, slack=3e-7)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_greedy(body: NativeBody, packed: bool, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for rows, outs in ((1, 5), (3, 97), (16, 1000), (20, 333)):
        m = matrix(outs, 32, packed=packed, bias=False)[0]
        m.weight.sign_()  # few different sums: ties are common
        x = normal(rows, 32, seed=rows).sign()
        logits = body.linear(m, x)
        assert outs < 1000 or (logits.float().topk(2).values.diff() == 0).any()
        tokens, values = body.greedy(m, x)
        assert torch.equal(tokens, logits.float().argmax(-1))
        assert torch.equal(values, logits.float().amax(-1))
    torch.set_num_threads(before)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (5, 48), (3, 4, 12), (2, 1000)], ids=str)
def test_rms_norm(body: NativeBody, shape: tuple[int, ...], offset: float) -> None:
    x, weight = normal(*shape), normal(shape[-1], seed=1)
    y = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    got = body.rms_norm(x, weight, 1e-6, offset)
    if offset:
        close(got, y * (offset + weight.double()), slack=1e-6)
    else:  # rounded before it is multiplied
        error = (got.double() - y * weight.double()).abs()
        assert (error <= (y * weight.double()).abs() * 2.02 * HALF_ULP + 1e-6).all()
    assert (got == reference.rms_norm(x, weight, 1e-6, offset)).float().mean() > 0.95


@pytest.mark.parametrize("shape", [(1, 2), (2, 7), (5, 48), (3, 4, 12), (2, 1000)], ids=str)
def test_layer_norm(body: NativeBody, shape: tuple[int, ...]) -> None:
    """Also far from zero, where the mean is much larger than what is left without it."""
    weight, bias = normal(shape[-1], seed=1), normal(shape[-1], seed=2)
    for x in (normal(*shape), normal(*shape) + 20):
        exact = F.layer_norm(x.double(), shape[-1:], weight.double(), bias.double(), 1e-5)
        close(body.layer_norm(x, weight, bias, 1e-5), exact, slack=2e-5)


def exact_attention(
    q: Tensor, keys: Tensor, values: Tensor, entries: list[int], scale: float, softcap: float | None
) -> Tensor:
    """One row, float64: (H, D) over (K, S, D)."""
    group = q.shape[0] // keys.shape[0]
    k, v = (t[:, entries].double().repeat_interleave(group, 0) for t in (keys, values))
    scores = (k @ q.double()[:, :, None])[..., 0] * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return (torch.softmax(scores, -1)[:, None] @ v)[:, 0]


@each_body
@given(
    shape=st.sampled_from([(8, 2, 32), (4, 4, 12), (6, 1, 64), (2, 2, 128), (3, 1, 5), (4, 2, 80), (2, 1, 33)]),
    seen=st.lists(st.integers(1, 200), min_size=1, max_size=9),
    tail=st.booleans(),
    window=st.sampled_from([None, 1, 20, 64, 100]),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 5),
)
def attention_is_exact(
    body: NativeBody,
    shape: tuple[int, int, int],
    seen: list[int],
    tail: bool,
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    heads, kv_heads, width = shape
    rows, capacity, slots = len(seen), 256, 3
    keys, values = (normal(slots, kv_heads, capacity, width, seed=seed + s) for s in (1, 2))
    values[:, :, 230:] = keys[:, :, 230:] = math.nan  # nobody names these
    generator = torch.Generator().manual_seed(seed)
    slot = torch.randint(0, slots, (rows,), generator=generator)
    path = torch.stack([200 + torch.randperm(30, generator=generator)[:5] for _ in range(rows)])
    path[torch.arange(5) >= torch.randint(0, 6, (rows, 1), generator=generator)] = -1
    q = normal(rows, heads + 2, width, seed=seed + 3)[:, :heads]  # rows further apart than their width
    reads = [[*range(n), *(e for e in path[r].tolist() if tail and e >= 0)] for r, n in enumerate(seen)]
    got = body.attend_rows(
        *(q, *in_blocks(keys, values), slot, torch.tensor(seen), path if tail else None),
        window=window, scale=0.3, softcap=softcap,
    )  # fmt: skip
    for row, entries in enumerate(reads):
        at = int(slot[row])
        exact = exact_attention(q[row], keys[at], values[at], entries[-(window or 1000) :], 0.3, softcap)
        close(got[row], exact, slack=2e-5)


def test_attention(body: NativeBody) -> None:
    attention_is_exact(body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 1, 16, 2), (3, 2, 17, 5)])
def test_several_matrices_are_packed_as_each_is(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weights = normal(*shape)
    packed = pack(weights, dtype)
    for first in range(shape[0]):
        for second in range(shape[1]):
            assert torch.equal(packed[first, second], pack(weights[first, second], dtype))
