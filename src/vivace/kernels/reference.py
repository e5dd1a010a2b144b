"""The operations in PyTorch, arranged so that the bits of a row do not depend on the other rows of a call.

A row must have the same bits alone, beside fifteen others, or as a node of a draft tree: greedy speculative decoding is
then lossless by construction (``decode/verify.py``). PyTorch promises nothing of the kind. On CPUs it holds under these
rules:

* ``linear`` in bfloat16: PyTorch sums a row in the same order for any number of rows, provided that the product is
  large enough and, with more than 1024 inputs, that there are at least two rows. Fewer rows are therefore padded. On
  processors with AMX more than 32 rows are summed in another order, so rows are multiplied in blocks of 32. In float32
  the numbers of rows that agree differ from processor to processor, so rows are multiplied in blocks of exactly
  sixteen.
* ``attend_rows`` in bfloat16 makes every row a batch element of its own, over keys padded to a multiple of 64; its
  result then depends only on the row and the entries it reads. In float32 each row is computed by itself, over exactly
  the entries it reads.
* ``pointwise`` evaluates functions such as exponentials on whole vectors in one thread, because PyTorch computes the
  last few numbers of each thread's share with another implementation.

``tests/kernels/test_row_invariance.py`` checks these rules on the machine at hand.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vivace.kernels import fused
from vivace.kernels.widened import widened_products

KEY_BLOCK = 64
"""Entries are read in blocks of this many, so that a longer neighbour does not change how a row's sums are grouped."""

WIDE = 1024
"""With more inputs than this, a single bfloat16 row is summed in another order than several."""

AMX_ROWS = 32
"""With more bfloat16 rows than this, a processor with AMX multiplies in tiles, which sum in another order."""

FLOAT_ROWS = 16
"""Number of rows of every float32 product."""

SHORT = 512
"""Number of rows up to which attention with gradients keeps all of its scores."""

SMALL_PRODUCT = 16**3
"""bfloat16 products with rows x in x out at most this are summed in another order than larger ones."""

SMALL_INPUT = 64
"""On some processors, so are bfloat16 products with rows x in below this."""

assert fused.BLOCK == KEY_BLOCK, "rows of the fused kernels read whole key blocks"

_ANY_ORDER: ContextVar[bool] = ContextVar("any_order", default=False)


@contextmanager
def any_order() -> Iterator[None]:
    """Let products sum rows in any order within this context: training needs speed, not reproducible rows.

    On processors without products of bfloat16 they are computed in float32 (``widened.py``).
    """
    token = _ANY_ORDER.set(True)
    try:
        with widened_products():
            yield
    finally:
        _ANY_ORDER.reset(token)


def _is_free(x: Tensor) -> bool:
    """Return whether rows may be summed in any order: not on a CPU, under gradients, or within ``any_order``."""
    return x.device.type != "cpu" or torch.is_grad_enabled() or _ANY_ORDER.get()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``; on a CPU the bits of a row do not depend on the other rows.

    Args:
        x: (T, in).
        weight: (out, in).
        bias: (out,).

    Returns:
        (T, out).
    """
    if _is_free(x):
        return F.linear(x, weight, bias)
    rows, block = x.shape[0], _block(weight)
    if rows > block:
        return torch.cat([linear(part, weight, bias) for part in x.split(block)])
    enough = _invariant_rows(rows, weight)
    if enough == rows:
        return F.linear(x, weight, bias)
    padded = x.new_zeros(enough, x.shape[1])
    padded[:rows] = x
    return F.linear(padded, weight, bias)[:rows]


def _block(weight: Tensor) -> int:
    """Return the largest number of rows of one product with this matrix."""
    if weight.dtype == torch.float32:
        return FLOAT_ROWS
    return AMX_ROWS if weight.dtype == torch.bfloat16 and _has_amx() else sys.maxsize


@cache
def _has_amx() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def _invariant_rows(rows: int, weight: Tensor) -> int:
    """Return the number of rows to pad to, so that each row has the bits that it has among many."""
    if weight.dtype == torch.float32:
        return FLOAT_ROWS
    if weight.dtype == torch.bfloat16:
        wide = weight.shape[1]
        return max(rows, SMALL_PRODUCT // weight.numel() + 1, -(-SMALL_INPUT // wide), 1 + (wide > WIDE))
    return rows


VECTOR = 64
"""Largest number of elements that PyTorch evaluates together, over all instruction sets and dtypes."""

GRAIN = 16384
"""Number of elements up to which PyTorch never divides a pointwise operation among threads."""


def pointwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function to every element; on a CPU the bits of a row do not depend on the other rows.

    Args:
        function: an elementwise function such as ``F.silu``. Functions without rounding (``F.relu``) do not need this.
        x: (..., n), whose last dimension is a row.

    Returns:
        The same shape as x.
    """
    width = x.shape[-1]
    if _is_free(x) or x.numel() == width:
        return function(x)
    x = x.contiguous()  # PyTorch has a third implementation for strided tensors
    is_even = width % VECTOR == 0
    if is_even and x.numel() <= GRAIN:
        return function(x)
    rows = max(1, GRAIN // width) if is_even else 1
    return torch.cat([function(part) for part in x.view(-1, width).split(rows)]).view(x.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return the root-mean-square norm over the last dimension, computed in float32 (Zhang & Sennrich 2019)."""
    if x.is_cuda and not offset and weight.dtype == x.dtype and not torch.is_grad_enabled():
        return F.rms_norm(x, weight.shape, weight, eps)  # one kernel, which rounds once and not twice
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (y * (offset + weight.float())).to(x.dtype)
    return y.to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to heads (Su et al. 2021), component i paired with i + width / 2 as by Hugging Face.

    Args:
        x: (T, heads, D).
        cos: (T, 1, width), for the first width <= D components of a head.
        sin: (T, 1, width), its first half negated, so that ``x * cos + swap_halves(x) * sin`` is the rotation.
    """
    if fused.can_run(x):
        return fused.rotate(x, cos, sin)
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(width // 2, -1), sin)
    head = x[..., :width]
    return torch.cat((torch.addcmul(head * cos, head.roll(width // 2, -1), sin), x[..., width:]), -1)


def attend_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the attention of single rows, each to its own entries.

    Args:
        q: (T, H, D) queries.
        keys: (T, K, S, D), or (1, K, S, D) shared by all rows.
        values: like keys.
        visible: additive mask (T, S), 0 or -inf, in q's dtype; None when every row reads all S entries.
        scale: factor on q.k.
        softcap: scores become ``c * tanh(score / c)`` when set (Gemma 2).
        bias: (T, H, S) added to scores.

    Returns:
        (T, H, D).
    """
    rows, heads, width = q.shape
    kv_heads = keys.shape[1]
    grouped = q.view(rows, kv_heads, heads // kv_heads, width)
    is_float = q.dtype == torch.float32 and q.device.type == "cpu"
    if is_float and rows > 1:
        each = [_one_row(grouped, keys, values, visible, row, scale, softcap, bias) for row in range(rows)]
        return torch.cat(each).view(rows, heads, width)
    if is_float:
        return _one_row(grouped, keys, values, visible, 0, scale, softcap, bias).view(rows, heads, width)
    mask = None if visible is None else visible[:, None, None, :]
    if bias is not None:
        mask = bias.view(rows, kv_heads, -1, bias.shape[-1]) + (0 if mask is None else mask)
    keys, values = keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1)
    return _attend(grouped, keys, values, mask, scale, softcap).reshape(rows, heads, width)


def _one_row(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor | None,
    row: int,
    scale: float,
    softcap: float | None,
    bias: Tensor | None,
) -> Tensor:
    at = row if keys.shape[0] > 1 else 0
    k, v = keys[at : at + 1], values[at : at + 1]
    mask = None if bias is None else bias[row].view(1, q.shape[1], -1, bias.shape[-1])
    if visible is not None:
        seen = (visible[row] == 0).nonzero()[:, 0]
        k, v = k[:, :, seen], v[:, :, seen]
        mask = None if mask is None else mask[..., seen]
    return _attend(q[row : row + 1], k, v, mask, scale, softcap)


def attend_chunk(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Return the attention of neighbouring rows of one slot (prefill) or of a dense batch (training, encoders).

    On processors without products of bfloat16 they are computed in float32 (``widened.py``).

    Args:
        q: (B, T, H, D) queries.
        keys: (B, K, S, D).
        values: like keys.
        visible: additive mask that broadcasts to (B, 1, T, S), or (H, T, S) with a number for each head; None means
            causal attention with S == T.
        scale: factor on q.k.
        softcap: as in ``attend_rows``.

    Returns:
        (B, T, H, D).
    """
    q = q.transpose(1, 2)
    if softcap is None and torch.is_grad_enabled() and q.shape[2] <= SHORT:
        return _attend_learning(q, keys, values, visible, scale).transpose(1, 2)
    if softcap is None:
        with _arithmetic_of(q):
            out = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=visible, is_causal=visible is None, scale=scale, enable_gqa=True
            )
        return out.transpose(1, 2)
    group = q.shape[1] // keys.shape[1]
    if visible is None:
        length = q.shape[2]
        visible = torch.full((length, length), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    return _attend(q, keys, values, visible, scale, softcap).transpose(1, 2)


def _arithmetic_of(q: Tensor) -> AbstractContextManager[object]:
    """Return the context in which PyTorch attends: on a GPU without cuDNN where gradients are asked for.

    With it trainings gave losses that are no numbers (H200, PyTorch 2.11; the cause was not found).
    """
    if q.is_cuda and torch.is_grad_enabled():
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    return widened_products() if q.dtype == torch.bfloat16 and q.device.type == "cpu" else nullcontext()


def _attend_learning(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """Compute attention (B, H, T, D) step by step: its backward pass takes half the time of the fused one on a CPU, and
    on a GPU it does not depend on which fused one PyTorch takes.
    """
    batch, heads, rows, width = q.shape
    kv_heads, entries = keys.shape[1], keys.shape[2]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads * rows, width)
    if visible is None:
        visible = torch.full((rows, entries), -math.inf, dtype=torch.float32, device=q.device).triu(1)
    scores = (grouped @ keys.mT).float().view(batch, kv_heads, heads // kv_heads, rows, entries) * scale
    first = (1, kv_heads, -1) if visible.dim() == 3 else (-1, 1, 1)  # a number for each head, or one for each text
    weights = torch.softmax(scores + visible.view(*first, *visible.shape[-2:]), -1).to(values.dtype)
    return (weights.view(batch, kv_heads, -1, entries) @ values).view(batch, heads, rows, width)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    if softcap is None:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    scores = torch.matmul(q, keys.transpose(-1, -2)).float() * scale
    scores = softcap * pointwise(torch.tanh, scores / softcap)
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, -1).to(values.dtype), values)
