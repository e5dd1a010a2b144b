"""A row's bits depend on the row and what it reads, not on how many others there are: the ground of losslessness."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.kernels import reference as kernels

COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 13, 16, 17, 22, 31, 64, 80, 127, 128)
LENGTHS = (1, 2, 17, 63, 64, 65, 100, 128, 129, 300)
WIDTHS = [(48, 96), (256, 768), (320, 832), (8, 256), (256, 8), (24, 48), (1100, 64)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def cancelling(rows: int, in_width: int, out_width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows and a matrix whose products sum to zero, so that the order of summation is all that is left to see.

    In bfloat16 the rounding of the result would hide it nearly always.
    """
    x, weight = normal(rows, in_width // 2, dtype=dtype), normal(out_width, in_width // 2, dtype=dtype, seed=1)
    order = torch.randperm(in_width // 2 * 2, generator=torch.Generator().manual_seed(2))
    return torch.cat((x, x), 1)[:, order].contiguous(), torch.cat((weight, -weight), 1)[:, order].contiguous()


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "widths", [(48, 96), (256, 768), (320, 832), (8, 256), (256, 8), (24, 48), (1100, 64)], ids=str
)
def test_linear(widths: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    rows, weight = cancelling(128, *widths, dtype)
    bias = normal(widths[1], dtype=dtype, seed=2) * 1e-6
    watched = 24
    alone = torch.cat([kernels.linear(row[None], weight, bias) for row in rows[:watched]])
    for count in COUNTS:
        among = torch.cat((rows[watched:], rows[:watched]))[-count:]  # the watched rows come last
        same = min(count, watched)
        assert torch.equal(kernels.linear(among, weight, bias)[-same:], alone[-same:]), f"last of {count} rows"
        assert torch.equal(kernels.linear(rows[:count], weight, bias)[:same], alone[:same]), f"first of {count} rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transposed_weights(dtype: torch.dtype) -> None:
    """Matrices stored (in, out), as GPT-2's are, shared without a copy."""
    rows, weight = cancelling(32, 256, 512, dtype)
    weight = weight.t().contiguous().t()
    alone = torch.cat([kernels.linear(row[None], weight) for row in rows])
    for count in (2, 3, 5, 8, 11, 16, 32):
        assert torch.equal(kernels.linear(rows[:count], weight), alone[:count]), f"{count} rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_rotation(dtype: torch.dtype) -> None:
    rows = normal(64, 256, dtype=dtype)
    weight = normal(256, dtype=dtype, seed=1)
    cos, sin = normal(64, 1, 32, dtype=dtype, seed=2), normal(64, 1, 32, dtype=dtype, seed=3)

    def all_at(part: slice) -> tuple[Tensor, Tensor, Tensor]:
        x = rows[part]
        heads = x.view(-1, 8, 32)
        return (
            kernels.rms_norm(x, weight, 1e-6),
            F.layer_norm(x, (256,), weight),
            kernels.rotate(heads, cos[part], sin[part]),
        )

    alone = [torch.cat(column) for column in zip(*(all_at(slice(i, i + 1)) for i in range(64)), strict=True)]
    for count in (2, 3, 5, 16, 64):
        for together, expected in zip(all_at(slice(count)), alone, strict=True):
            assert torch.equal(together, expected[:count])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "function",
    [F.silu, F.gelu, partial(F.gelu, approximate="tanh"), torch.tanh],
    ids=["silu", "gelu", "gelu_tanh", "tanh"],
)
@pytest.mark.parametrize("width", [20, 56, 832, 11008])
def test_pointwise(width: int, function: Callable[[Tensor], Tensor], dtype: torch.dtype, threads: int) -> None:
    """Three threads cut a call at places that are no multiple of anything."""
    torch.set_num_threads(threads)
    rows = normal(40, width, dtype=dtype) * 3
    gates = torch.cat((rows, rows), 1).chunk(2, -1)[0]
    alone = torch.cat([kernels.pointwise(function, row[None]) for row in rows])
    for count in (2, 3, 4, 7, 8, 13, 20, 34, 40):
        assert torch.equal(kernels.pointwise(function, rows[:count]), alone[:count]), f"{count} rows"
        assert torch.equal(kernels.pointwise(function, gates[:count]), alone[:count]), f"{count} rows of a gate"


def cancelling_attention(
    rows: int, shape: tuple[int, int, int], longest: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores that sum to zero, and values that do where two neighbours are both seen."""
    heads, kv_heads, width = shape
    half, keys = normal(rows, heads, width // 2, dtype=dtype), normal(rows, kv_heads, longest, width // 2, dtype=dtype)
    values = normal(rows, kv_heads, longest // 2, width, dtype=dtype, seed=2)
    q = torch.cat((half, half), -1) * 8
    return torch.cat((keys, -keys), -1), torch.stack((values, -values), 3).flatten(2, 3), q


def mask(lengths: tuple[int, ...], longest: int, window: int | None, dtype: torch.dtype) -> Tensor:
    ordinal = torch.arange(longest)
    reach = torch.tensor(lengths)[:, None]
    hidden = ordinal >= reach
    if window is not None:
        hidden |= ordinal <= reach - 1 - window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)


def blocks(length: int) -> int:
    return -(-length // kernels.KEY_BLOCK) * kernels.KEY_BLOCK


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("shape", [(8, 2, 32), (4, 4, 12), (6, 1, 64)], ids=str)
def test_attention_beside_longer_rows(
    shape: tuple[int, int, int], softcap: float | None, window: int | None, dtype: torch.dtype
) -> None:
    """Rows of sixteen lengths: alone over their own blocks, and together over the longest row's."""
    width = shape[2]
    lengths = (*LENGTHS, 5, 64, 90, 192, 257, 300)
    longest = blocks(max(lengths))
    keys, values, q = cancelling_attention(16, shape, longest, dtype)
    settings = {"scale": width**-0.5, "softcap": softcap}
    together = kernels.attend_rows(q, keys, values, mask(lengths, longest, window, dtype), **settings)
    for row, length in enumerate(lengths):
        own = blocks(length)
        k, v = keys[row : row + 1, :, :own], values[row : row + 1, :, :own]
        alone = kernels.attend_rows(q[row : row + 1], k, v, mask((length,), own, window, dtype), **settings)
        assert torch.equal(alone[0], together[row]), f"length {length}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attention_of_one_slot_without_a_gather(softcap: float | None, dtype: torch.dtype) -> None:
    """Keys shared by all rows of a slot give the same bits as each row's own copy of them."""
    lengths = tuple(range(60, 76))
    longest = blocks(max(lengths))
    keys, values = (normal(1, 2, longest, 32, dtype=dtype, seed=s) for s in (1, 2))
    q = normal(16, 8, 32, dtype=dtype)
    visible = mask(lengths, longest, None, dtype)
    shared = kernels.attend_rows(q, keys, values, visible, scale=0.2, softcap=softcap)
    own = kernels.attend_rows(
        q, keys.repeat(16, 1, 1, 1), values.repeat(16, 1, 1, 1), visible, scale=0.2, softcap=softcap
    )
    assert torch.equal(shared, own)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_hidden_entries_may_hold_anything(softcap: float | None, dtype: torch.dtype) -> None:
    """Float32 does not touch them at all; bfloat16 multiplies them by zero, so they have to be finite."""
    worst = (math.nan, math.inf) if dtype == torch.float32 else (1e4, -1e4)
    keys, values = (normal(3, 2, 128, 32, dtype=dtype, seed=s) for s in (1, 2))
    q = normal(3, 8, 32, dtype=dtype)
    visible = mask((70, 100, 128), 128, None, dtype)
    clean = kernels.attend_rows(q, keys, values, visible, scale=0.2, softcap=softcap)
    for stored in (keys, values):
        stored[0, :, 70:], stored[1, :, 100:] = worst
    assert torch.equal(kernels.attend_rows(q, keys, values, visible, scale=0.2, softcap=softcap), clean)


def test_training_gives_up_a_rows_bits_for_whole_products(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = normal(70, 48, dtype=torch.float32), normal(96, 48, dtype=torch.float32, seed=1)
    sizes: list[int] = []
    monkeypatch.setattr(F, "linear", lambda x, *_: sizes.append(len(x)) or x @ weight.T)
    with kernels.any_order():
        together = kernels.linear(x, weight)
    assert sizes == [70]
    torch.testing.assert_close(together, kernels.linear(x, weight))
    assert set(sizes[1:]) == {kernels.FLOAT_ROWS}, "and outside of it rows have their own bits again"
