"""Natively too a row's bits depend on the row alone: on no neighbour, no number of threads, no address.

As in ``test_row_invariance``, sums cancel, so that the order of summation is all that is left to see.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

from tests.core.entries import in_blocks
from tests.kernels.test_row_invariance import cancelling, cancelling_attention, normal
from vivace.kernels.library import runnable
from vivace.kernels.native import Matrix, NativeBody, pack

ROWS = (*range(1, 18), 24, 31, 32, 33, 48, 64, 96, 97, 200)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows_are_their_own(
    body: NativeBody, widths: tuple[int, int], dtype: torch.dtype, packed: bool, counts: Iterable[int]
) -> None:
    """Products of a row, plain and gated, are the same alone and first or last of so many rows."""
    x, weight = cancelling(200, *widths, dtype)
    m = Matrix(pack(weight) if packed else weight, normal(widths[1], dtype=dtype, seed=2) * 1e-6, *widths)
    gate = Matrix(pack(weight.roll(1, 0)), None, *widths)
    torch.set_num_threads(1)
    alone = torch.cat([body.linear(m, row[None]) for row in x])
    assert (alone != 0).float().mean() > 0.5, "nothing to see: the sums are exact"
    gated = torch.cat([body.gated(gate, gate, row[None], "silu") for row in x])
    for count in counts:
        torch.set_num_threads(1 + count % 4)
        assert torch.equal(body.linear(m, x[:count]), alone[:count]), f"first of {count} rows"
        assert torch.equal(body.linear(m, x[-count:]), alone[-count:]), f"last of {count} rows"
        assert torch.equal(body.gated(gate, gate, x[-count:], "silu"), gated[-count:]), f"{count} gated rows"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("widths", [(48, 96), (256, 777), (1100, 64), (24, 33)], ids=str)
def test_linear(body: NativeBody, widths: tuple[int, int], packed: bool) -> None:
    rows_are_their_own(body, widths, BF16, packed, ROWS)


@pytest.mark.parametrize("packed", [True, False])
def test_no_rows_have_no_products(body: NativeBody, packed: bool) -> None:
    x, weight = cancelling(1, 48, 96, BF16)
    m = Matrix(pack(weight) if packed else weight, None, 48, 96)
    assert body.linear(m, x[:0]).shape == (0, 96)
    assert body.gated(m, m, x[:0], "silu").shape == (0, 96)


@pytest.mark.parametrize("packed", [True, False])
def test_tile_registers_sum_even_and_odd_inputs_apart(library: ctypes.CDLL, packed: bool) -> None:
    """As no other body does: what is lost beside a large number in one chain is kept in two."""
    if "amx" not in runnable(library):
        pytest.skip("this processor does not run the amx kernels")
    weight = torch.tensor([2.0**30, 1, -(2.0**30), 1] + [0.0] * 28).bfloat16().repeat(16, 1)
    for rows in (1, 3, 16, 20):
        m, x = Matrix(pack(weight) if packed else weight, None, 32, 16), torch.ones(rows, 32).bfloat16()
        assert (NativeBody("amx", library).linear(m, x) == 2).all()
        if packed:
            assert (NativeBody("avx512", library).linear(m, x) == 0).all()


def test_norm(body: NativeBody) -> None:
    x, weight = normal(64, 300, dtype=BF16), normal(300, dtype=BF16, seed=1)
    alone = torch.cat([body.rms_norm(row[None], weight, 1e-6) for row in x])
    assert torch.equal(body.rms_norm(x, weight, 1e-6), alone)
    alone = torch.cat([body.layer_norm(row[None], weight, weight, 1e-6) for row in x])
    assert torch.equal(body.layer_norm(x, weight, weight, 1e-6), alone)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("shape", [(8, 2, 32), (4, 4, 12), (6, 1, 64)], ids=str)
def test_attention(body: NativeBody, shape: tuple[int, int, int], softcap: float | None, window: int | None) -> None:
    """Sixteen rows of sixteen lengths, each alone, and as tree nodes whose last entries are scattered."""
    lengths = torch.tensor([1, 2, 17, 63, 64, 65, 100, 128, 129, 300, 5, 64, 90, 192, 257, 300])
    keys, values, q = cancelling_attention(16, shape, 320, BF16)
    slot = torch.arange(16)
    settings = {"window": window, "scale": shape[2] ** -0.5, "softcap": softcap}
    torch.set_num_threads(2)
    together = body.attend_rows(q, *in_blocks(keys, values), slot, lengths, None, **settings)
    torch.set_num_threads(1)
    for row in range(16):
        own = slice(row, row + 1)
        k, v = keys[own].contiguous(), values[own].contiguous()
        alone = body.attend_rows(q[own], *in_blocks(k, v), slot[:1], lengths[own], None, **settings)
        assert torch.equal(alone[0], together[row]), f"row {row}"
        seen = max(int(lengths[row]) - 7, 0)
        count = int(lengths[row]) - seen
        places = 301 + torch.randperm(19, generator=torch.Generator().manual_seed(row))[:count]
        for stored in (k, v):
            stored[:, :, places] = stored[:, :, seen : seen + count].clone()
            stored[:, :, seen : seen + count] = torch.nan
        tail = torch.cat((places, torch.tensor([-1, -1])))[None]
        scattered = body.attend_rows(q[own], *in_blocks(k, v), slot[:1], torch.tensor([seen]), tail, **settings)
        assert torch.equal(scattered[0], together[row]), f"row {row} as a tree node"


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 48), (8, 1, 32), (4, 1, 256), (6, 2, 40), (2, 1, 260)], ids=str)
def test_attention_of_a_prompt(
    body: NativeBody, shape: tuple[int, int, int], softcap: float | None, dtype: torch.dtype
) -> None:
    """Rows that follow each other, so many that a block of entries is laid out once for many query heads."""
    if body.of(dtype) is None:
        pytest.skip(f"the {body.name} kernels have no {dtype}")
    body = body.of(dtype) or body
    first, rows, entries = 90, 131, 256
    keys, values, q = cancelling_attention(rows, shape, entries, dtype)
    keys, values = keys[:1].clone(), values[:1].clone()
    values[:, :, first + rows - 1 :] = torch.inf  # only the last row reads the first of these, no row the others
    keys[:, :, first + rows :] = torch.nan
    stored, slot, seen = in_blocks(keys, values), torch.zeros(rows, dtype=torch.int64), first + 1 + torch.arange(rows)
    how = {"window": None, "scale": shape[2] ** -0.5, "softcap": softcap}
    torch.set_num_threads(2)
    together = body.attend_rows(q, *stored, slot, seen, None, **how)
    assert together[:-1].isfinite().all()
    assert not together[-1].isfinite().any()
    torch.set_num_threads(1)
    for row in (0, 1, 15, 16, 37, 38, 101, 127, 128, 129, 130):
        own = slice(row, row + 1)
        alone = body.attend_rows(q[own], *stored, slot[own], seen[own], None, **how)
        assert alone.equal(together[own]) or row == rows - 1, f"row {row}"
    few = body.attend_rows(q[60:66], *stored, slot[60:66], seen[60:66], None, **how)
    assert few.equal(together[60:66])


def work(body: NativeBody) -> Tensor:
    x, weight = cancelling(5, 256, 2048, BF16)
    return body.linear(Matrix(pack(weight), None, 256, 2048), x)


def test_several_python_threads(body: NativeBody) -> None:
    """Those who find the pool taken work alone; nobody waits for ever and nobody's numbers change."""
    torch.set_num_threads(3)
    expected = work(body)
    wrong: list[int] = []

    def call(number: int) -> None:
        with torch.inference_mode():
            for _ in range(30):
                if not torch.equal(work(body), expected):
                    wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert not any(caller.is_alive() for caller in callers)
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_a_fork(body: NativeBody) -> None:
    """A child has none of its parent's threads; it starts its own."""
    torch.set_num_threads(2)
    x, weight = cancelling(5, 256, 2048, BF16)
    m = Matrix(pack(weight), None, 256, 2048)
    expected = body.linear(m, x)
    done = threading.Event()

    def keep_busy() -> None:
        with torch.inference_mode():
            while not done.is_set():
                body.linear(m, x)

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        for _ in range(12):  # some of them while the pool is at work
            child = os.fork()
            if child == 0:
                signal.alarm(10)  # ends a child that hangs
                same = all(torch.equal(body.linear(m, x), expected) for _ in range(5))
                os._exit(0 if same else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        done.set()
        busy.join()
    assert torch.equal(body.linear(m, x), expected)
