"""Attention of the streams of many positions at once, for training: no position's streams see another's.

A stream's weights are one softmax over the main keys up to its position and the streams of its row up to itself.
Scores of the two parts stand side by side, so the block-diagonal part is (streams, streams) a position and no mask
over all pairs of streams is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values of streams as a layer projects them."""

    q: Tensor
    """(B, P, streams, H, D)"""
    k: Tensor
    """(B, P, streams, K, D)"""
    v: Tensor
    """As k."""


def attend_streams(
    own: Heads, main: tuple[Tensor, Tensor], mask: Tensor, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Attention of streams to the main stream and to the streams of their own row.

    Args:
        own: of P positions in each batch element.
        main: keys and values of the main stream, each (B, K, T, D).
        mask: what ``stream_mask`` gives.
        scale: factor on q.k.
        softcap: ``c * tanh(score / c)`` when set.

    Returns:
        (B, P, streams, H, D).
    """
    batch, places, count, heads, width = own.q.shape
    keys, values = main
    kv_heads, length = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    q = own.q.view(batch, places, count, kv_heads, group, width).permute(0, 3, 4, 1, 2, 5)
    far = (q.reshape(batch, kv_heads, -1, width) @ keys.mT).view(batch, kv_heads, group, places, count, length)
    near = torch.einsum("bkgpiw,bpjkw->bkgpij", q, own.k)
    scores = torch.cat((far, near), -1).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores + mask, -1).to(values.dtype)
    far, near = weights[..., :length], weights[..., length:]
    read = (far.reshape(batch, kv_heads, -1, length) @ values).view(batch, kv_heads, group, places, count, width)
    read = read + torch.einsum("bkgpij,bpjkw->bkgpiw", near, own.v)
    return read.permute(0, 3, 4, 1, 2, 5).reshape(batch, places, count, heads, width)


def stream_mask(position: Tensor, count: int, length: int, window: int | None) -> Tensor:
    """Main keys ``<= position`` and streams of the row up to the one that reads.

    Args:
        position: (B, P) of the rows the streams hang from.
        count: streams of each.
        length: T.
        window: a stream reads only the last this many tokens before it, itself included.

    Returns:
        Additive, (B, 1, 1, P, streams, T + streams) float32.
    """
    ahead = torch.arange(1, count + 1)
    stands = position[..., None, None] + ahead[:, None]
    main = torch.arange(length).expand(*position.shape, count, length)
    own = position[..., None, None] + ahead.expand(count, count)
    hidden = torch.cat((main > position[..., None, None], own > stands), -1)
    if window is not None:
        hidden |= torch.cat((main, own), -1) <= stands - window
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)
    return mask[:, None, None]
