"""Sums over ranks: every rank gets the sum of all ranks' tensors, with the same bits.

In one shot every rank sends its tensor to all others and adds all of them itself. In two shots it first sends to every
rank the rows that this rank adds, and then gets the sums of the others: ``2 (R - 1) / R`` tensors are sent instead of
``R - 1``, but ranks wait for each other twice. Both add in the order of ranks in float32 and round once to the dtype of
the tensors, so that they give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vivace.core.summed import Point
from vivace.parallel.world import World

TWO_SHOT_BYTES = 32 << 10
"""Tensors of more bytes are summed in two shots where there are more than two ranks."""


class LinkedSum:
    """Implements ``Collective`` over the links of a world."""

    def __init__(self, world: World) -> None:
        """Sum among the ranks of a world; all of them make the same calls in the same order."""
        self._world = world
        self._count = 0

    def all_reduce(self, x: Tensor, *, point: Point) -> Tensor:
        """Return the sum of all ranks' ``x`` (T, n), which have the same shape, in the dtype of ``x``."""
        x = x.contiguous()
        tag = self._next()
        if self._world.size > 2 and x.nbytes > TWO_SHOT_BYTES and len(x) >= self._world.size:
            return self._in_two_shots(x, tag, point[1])
        return added(self._gathered(x, tag, point[1]), x.dtype)

    def _gathered(self, x: Tensor, tag: int, purpose: str) -> list[Tensor]:
        """Return the tensors of all ranks, in their order."""
        world = self._world
        for rank in world.others:
            world.links.send(rank, tag, x, purpose=purpose)
        parts = []
        for rank in range(world.size):
            if rank == world.rank:
                parts.append(x)
            else:
                parts.append(torch.empty_like(x))
                world.links.receive(rank, tag, parts[-1])
        return parts

    def _in_two_shots(self, x: Tensor, tag: int, purpose: str) -> Tensor:
        world = self._world
        rows = x.tensor_split(world.size)
        for rank in world.others:
            world.links.send(rank, tag, rows[rank], purpose=purpose)
        parts = [torch.empty_like(rows[world.rank]) for _ in range(world.size)]
        parts[world.rank] = rows[world.rank]
        for rank in world.others:
            world.links.receive(rank, tag, parts[rank])
        own, tag = added(parts, x.dtype), self._next()
        for rank in world.others:
            world.links.send(rank, tag, own, purpose=purpose)
        total = torch.empty_like(x)
        sums = total.tensor_split(world.size)
        sums[world.rank].copy_(own)
        for rank in world.others:
            world.links.receive(rank, tag, sums[rank])
        return total

    def _next(self) -> int:
        """Return a number for the frames of the next exchange, the same on all ranks."""
        self._count = (self._count + 1) % (1 << 31)
        return self._count


def added(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum of tensors, added one after the other in float32 and rounded once."""
    total = parts[0].float()
    total = total + parts[1].float() if len(parts) > 1 else total.clone()
    for part in parts[2:]:
        total += part.float()
    return total.to(dtype)
