"""The Triton kernels of ``fused.py``, which says what they compute; a program of one works on one row and head."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate(x, cos, sin, out, by_row, by_head, by_angle, out_row, width, rotated, BLOCK_D: tl.constexpr):
    """Rotate one head of one row; components behind ``rotated`` stay."""
    row, head = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, BLOCK_D)
    half = rotated // 2
    other = tl.where(at < half, at + half, at - half)
    inside, turns = at < width, at < rotated
    source = x + row * by_row + head * by_head
    value = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    swapped = tl.load(source + other, mask=turns, other=0.0).to(tl.float32)
    c = tl.load(cos + row * by_angle + at, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + row * by_angle + at, mask=turns, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + head * width + at, value * c + swapped * s, mask=inside)


@triton.jit
def store(
    keys,
    values,
    address,
    into_keys,
    into_values,
    key_row,
    key_head,
    value_row,
    value_head,
    by_address,
    by_head,
    width,
    BLOCK_D: tl.constexpr,
):
    """Store the key and the value of one head of one row."""
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK_D)
    inside = at < width
    place = head * by_head + tl.load(address + row * by_address) * width + at
    tl.store(into_keys + place, tl.load(keys + row * key_row + head * key_head + at, mask=inside), mask=inside)
    tl.store(into_values + place, tl.load(values + row * value_row + head * value_head + at, mask=inside), mask=inside)


@triton.jit
def attend(
    q,
    keys,
    values,
    address,
    visible,
    sums,
    tops,
    scale,
    q_row,
    q_head,
    by_head,
    by_address,
    by_visible,
    group,
    width,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend from the queries that share a key head, in one row, to one block of its entries."""
    row, kv, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    parts = tl.num_programs(2)
    member, at, entry = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), part * BLOCK_S + tl.arange(0, BLOCK_S)
    asked = (member < group)[:, None] & (at < width)[None, :]
    head = kv * group + member
    rows = tl.load(q + row * q_row + head[:, None] * q_head + at[None, :], mask=asked, other=0.0)
    hidden = tl.load(visible + row * by_visible + entry).to(tl.float32)
    read = (hidden > float("-inf"))[:, None] & (at < width)[None, :]
    place = tl.load(address + row * by_address + entry)[:, None] * width + kv * by_head + at[None, :]
    k = tl.load(keys + place, mask=read, other=0.0)
    scores = tl.dot(rows, tl.trans(k)) * scale + hidden[None, :]
    top = tl.max(scores, 1)
    weights = tl.exp(scores - tl.where(top > float("-inf"), top, 0.0)[:, None])
    v = tl.load(values + place, mask=read, other=0.0)
    which = (row * tl.num_programs(1) * group + head) * parts + part
    tl.store(sums + which[:, None] * width + at[None, :], tl.dot(weights.to(v.dtype), v), mask=asked)
    tl.store(tops + 2 * which, top, mask=member < group)
    tl.store(tops + 2 * which + 1, tl.sum(weights, 1), mask=member < group)


@triton.jit
def join(sums, tops, out, width, parts, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    """Join what was attended to in blocks, for one head of one row; blocks without a visible entry change no bit."""
    which = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    piece, at = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    best, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    sum_ = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, parts, BLOCK_P):
        there = first + piece < parts
        place = which * parts + first + piece
        top = tl.load(tops + 2 * place, mask=there, other=float("-inf"))
        amount = tl.load(tops + 2 * place + 1, mask=there, other=0.0)
        now = tl.maximum(best, tl.max(top, 0))
        safe = tl.where(now > float("-inf"), now, 0.0)
        fades, shares = tl.exp(best - safe), tl.exp(top - safe)
        read = there[:, None] & (at < width)[None, :]
        block = tl.load(sums + place[:, None] * width + at[None, :], mask=read, other=0.0)
        sum_ = sum_ * fades + tl.sum(block * shares[:, None], 0)
        total = total * fades + tl.sum(amount * shares, 0)
        best = now
    tl.store(out + which * width + at, sum_ / total, mask=at < width)
