"""Sums over ranks: every rank gets the sum of all ranks' tensors, with the same bits.

In one shot every rank sends its tensor to all others and adds all of them itself. In two shots it first sends to every
rank the rows that this rank adds, and then gets the sums of the others: ``2 (R - 1) / R`` tensors are sent instead of
``R - 1``, but ranks wait for each other twice. Both add in the order of ranks in float32 and round once to the dtype of
the tensors, so that they give the same bits where numbers travel as they are.

A ``Wire`` says in which form they travel. In a lossy one a rank also takes its own numbers as the others receive them:
with the exact ones it would hold another sum than they do, and what all ranks hold would drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from vivace.core.summed import Point
from vivace.errors import ConfigError, nearest
from vivace.parallel.world import World

TWO_SHOT_BYTES = 32 << 10
"""Tensors of more bytes are summed in two shots where there are more than two ranks."""

EXACT_POINTS = {"q_norm", "k_norm"}
"""Where a single number a row is summed, which is never rounded."""


class Wire(Protocol):
    """A form in which rows travel."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what is sent for rows (T, n); shapes and dtypes depend on those of ``x`` alone."""
        ...

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """Return rows (T, n) in float32 from what was sent."""
        ...


class SameWire:
    """Implements ``Wire``: rows travel as they are."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the rows."""
        return (x.contiguous(),)

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the rows in float32."""
        return parts[0].float()


class HalfWire(SameWire):
    """Implements ``Wire``: rows travel in bfloat16, which rounds those of a float32 model."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the rows in bfloat16."""
        return (x.bfloat16().contiguous(),)


class ByteWire:
    """Implements ``Wire``: a number takes eight bits, and each row has a scale in float32, its largest number / 127."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return codes (T, n) and scales (T, 1)."""
        wide = x.float()
        scale = wide.abs().amax(-1, keepdim=True) / 127
        codes = (wide / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-127, 127)
        return codes.to(torch.int8), scale

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """Return codes times scales."""
        codes, scale = parts
        return codes.float() * scale


WIRES: dict[str, Wire] = {"same": SameWire(), "bf16": HalfWire(), "int8": ByteWire()}
"""Forms by the name that users write."""


def find_wire(name: str) -> Wire:
    """Return the form of this name.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    if name not in WIRES:
        raise ConfigError(f"wire is {name!r}{nearest(name, WIRES)}")
    return WIRES[name]


class LinkedSum:
    """Implements ``Collective`` over the links of a world."""

    def __init__(self, world: World, wire: Wire = WIRES["same"]) -> None:
        """Sum among the ranks of a world, over a wire; all of them make the same calls in the same order."""
        self._world = world
        self._wire = wire
        self._count = 0

    def all_reduce(self, x: Tensor, *, point: Point) -> Tensor:
        """Return the sum of all ranks' ``x`` (T, n), which have the same shape, in the dtype of ``x``."""
        site = point[1]
        wire = WIRES["same"] if site in EXACT_POINTS else self._wire
        world, others = self._world, self._world.others
        if world.size == 2 or x.nbytes <= TWO_SHOT_BYTES or len(x) < world.size:
            own = wire.encode(x)
            return added(
                [wire.decode(parts) for parts in self._exchanged(own, dict.fromkeys(others, own), site)], x.dtype
            )
        rows = [wire.encode(part) for part in x.tensor_split(world.size)]
        parts = self._exchanged(rows[world.rank], {rank: rows[rank] for rank in others}, site)
        total = wire.encode(added([wire.decode(part) for part in parts], x.dtype))
        return self._shared_out(total, [len(part[0]) for part in rows], wire, site).to(x.dtype)

    def _exchanged(
        self, own: tuple[Tensor, ...], sent: dict[int, tuple[Tensor, ...]], purpose: str
    ) -> list[tuple[Tensor, ...]]:
        """Send something to every other rank; return what all ranks have for this one, which looks like its own."""
        world, tag = self._world, self._next()
        for rank, parts in sent.items():
            world.links.send(rank, tag, *parts, purpose=purpose)
        found = []
        for rank in range(world.size):
            found.append(own if rank == world.rank else tuple(torch.empty_like(part) for part in own))
            if rank != world.rank:
                world.links.receive(rank, tag, *found[-1])
        return found

    def _shared_out(self, own: tuple[Tensor, ...], counts: Sequence[int], wire: Wire, purpose: str) -> Tensor:
        """Send the sums of this rank's rows to all others; return all sums in float32, in the order of rows."""
        world, tag = self._world, self._next()
        for rank in world.others:
            world.links.send(rank, tag, *own, purpose=purpose)
        sums = []
        for rank, count in enumerate(counts):
            parts = own if rank == world.rank else tuple(part.new_empty(count, *part.shape[1:]) for part in own)
            if rank != world.rank:
                world.links.receive(rank, tag, *parts)
            sums.append(wire.decode(parts))
        return torch.cat(sums)

    def _next(self) -> int:
        """Return a number for the frames of the next exchange, the same on all ranks."""
        self._count = (self._count + 1) % (1 << 31)
        return self._count


def added(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum of float32 tensors, added one after the other and rounded once."""
    total = parts[0] + parts[1] if len(parts) > 1 else parts[0].clone()
    for part in parts[2:]:
        total += part
    return total.to(dtype)


def summed_as_sent(parts: Sequence[Tensor], wire: Wire) -> Tensor:
    """Return the sum of all ranks' tensors as ranks get it in one shot, computed in one process."""
    return added([wire.decode(wire.encode(part)) for part in parts], parts[0].dtype)
