"""Operations on a GPU that take one launch where PyTorch takes several, in Triton.

A pass of few rows over a small model computes for two microseconds and waits for the next kernel: what it takes is the
number of its kernels. These are the operations of ``reference.py`` that PyTorch splits: rotation, storing keys and
values, and attention over entries wherever they lie, which PyTorch gathers first. Sums are in float32, as there; their
order is another.

Triton comes with PyTorch's builds for GPUs. Without it, and on other devices, ``reference.py`` computes all.
"""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

BLOCK = 64
"""Entries that one program attends to (``reference.KEY_BLOCK``): parts do not depend on how many entries there are, so
that a longer neighbour changes no sum."""
JOINED = 16
"""Parts that are joined together; further ones follow in their order."""
SUMS_AT_ONCE = 2**24
"""Numbers that the parts of an attention leave to be joined, 64 MiB; more rows take several launches."""
WIDEST = 256
"""Widest head: keys and values of a block must fit into a multiprocessor's memory."""


@cache
def can_compile(device: torch.device) -> bool:
    """Return whether Triton is installed, with the C compiler that it asks for, and knows bfloat16 on this GPU."""
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")
    return (
        find_spec("triton") is not None and compiler is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@cache
def _kernels() -> ModuleType:
    from vivace.kernels import fused_kernels

    return fused_kernels


def _whole(count: int) -> int:
    """Return the next power of two, which is what a program of a kernel can hold."""
    return 1 << (count - 1).bit_length()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which work for a device is launched: it is the current one where it is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def can_run(*heads: Tensor) -> bool:
    """Return whether these heads (..., D) are on a GPU, in 16 bits, of one width, and no gradients are asked for."""
    return (
        all(t.is_cuda and t.dtype in (torch.bfloat16, torch.float16) for t in heads)
        and {t.shape[-1] for t in heads} == {heads[0].shape[-1]}
        and heads[0].numel() > 0
        and heads[0].shape[-1] <= WIDEST
        and not torch.is_grad_enabled()
        and can_compile(heads[0].device)
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to heads (T, heads, D), as ``reference.rotate`` does."""
    rows, heads, width = x.shape
    rotated = cos.shape[-1]
    out = torch.empty((rows, heads, width), dtype=x.dtype, device=x.device)
    with on_device(x.device):
        _kernels().rotate[(rows, heads)](
            x,
            cos,
            sin,
            out,
            x.stride(0),
            x.stride(1),
            cos.stride(0),
            heads * width,
            width,
            rotated,
            _whole(width),
        )
    return out


def store(keys: Tensor, values: Tensor, address: Tensor, into_keys: Tensor, into_values: Tensor) -> None:
    """Store the keys and values of rows.

    Args:
        keys: (T, K, D), contiguous in D.
        values: like keys.
        address: (T,) places of the rows.
        into_keys: (K, capacity, D).
        into_values: like ``into_keys``.
    """
    rows, heads, width = keys.shape
    if rows == 0:
        return
    with on_device(keys.device):
        _kernels().store[(rows, heads)](
            keys,
            values,
            address,
            into_keys,
            into_values,
            *keys.stride()[:2],
            *values.stride()[:2],
            address.stride(0),
            into_keys.stride(0),
            width,
            _whole(width),
        )


def rows_at_once(q: Tensor, entries: int) -> int:
    """Return how many rows of queries (T, H, D) may attend to so many entries in one launch."""
    return max(1, SUMS_AT_ONCE // (q.shape[1] * q.shape[2] * max(1, entries // BLOCK)))


def attend(q: Tensor, keys: Tensor, values: Tensor, address: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Return the attention of single rows to stored entries.

    Args:
        q: (T, H, D) queries, contiguous in D.
        keys: (K, capacity, D) of all texts.
        values: like keys.
        address: (T, S) where the entries of each row are, or (1, S) for all rows; S is a multiple of ``BLOCK``.
        visible: additive mask (T, S), 0 or -inf; a row sees at least one entry.
        scale: factor on q.k.

    Returns:
        (T, H, D).
    """
    most = rows_at_once(q, address.shape[1])
    if len(q) > most:
        cuts = [slice(first, first + most) for first in range(0, len(q), most)]
        parts_of = [[part[rows] if len(part) > 1 else part for part in (q, address, visible)] for rows in cuts]
        return torch.cat([attend(some, keys, values, at, seen, scale) for some, at, seen in parts_of])
    rows, heads, width = q.shape
    kv_heads, parts = keys.shape[0], address.shape[1] // BLOCK
    group = heads // kv_heads
    out = torch.empty((rows, heads, width), dtype=q.dtype, device=q.device)
    sums = torch.empty((rows, heads, parts, width), dtype=torch.float32, device=q.device)
    tops = torch.empty((rows, heads, parts, 2), dtype=torch.float32, device=q.device)
    block_d = max(16, _whole(width))
    with on_device(q.device):
        _kernels().attend[(rows, kv_heads, parts)](
            q,
            keys,
            values,
            address,
            visible,
            sums,
            tops,
            scale,
            *q.stride()[:2],
            keys.stride(0),
            address.stride(0) if len(address) > 1 else 0,
            visible.stride(0) if len(visible) > 1 else 0,
            group,
            width,
            BLOCK,
            max(16, _whole(group)),
            block_d,
        )
        _kernels().join[(rows, heads)](sums, tops, out, width, parts, JOINED, block_d)
    return out
