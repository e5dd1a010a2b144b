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
from vivace.parallel.lowbit import FORMS
from vivace.parallel.world import World

TWO_SHOT_BYTES = 32 << 10
"""Tensors of more bytes are summed in two shots where there are more than two ranks."""

EXACT_POINTS = {"q_norm", "k_norm"}
"""Where a single number a row is summed, which is never rounded."""


class Wire(Protocol):
    """A form in which rows travel. ``point`` is the sum, ``source`` the rank whose rows they are; None is the sum."""

    @property
    def most_in_one_shot(self) -> int:
        """Return with how many ranks at most many rows are added in one shot; with more it takes two."""
        ...

    def encode(self, x: Tensor, point: Point, source: int | None) -> tuple[Tensor, ...]:
        """Return what is sent for rows (T, n); shapes and dtypes depend on those of ``x`` and on ``point`` alone."""
        ...

    def added(self, parts: Sequence[Sequence[Tensor]], point: Point, dtype: torch.dtype) -> Tensor:
        """Return the sum (T, n) of what all ranks have sent, in the order of ranks in float32, rounded once."""
        ...

    def decode(self, parts: Sequence[Tensor], point: Point) -> Tensor:
        """Return sums (T, n) in float32 from what the rank sent that has computed them."""
        ...


class SameWire:
    """Implements ``Wire``: rows travel as they are."""

    most_in_one_shot = 2

    def encode(self, x: Tensor, point: Point, source: int | None) -> tuple[Tensor, ...]:
        """Return the rows."""
        return (x.contiguous(),)

    def added(self, parts: Sequence[Sequence[Tensor]], point: Point, dtype: torch.dtype) -> Tensor:
        """Return the sum of all rows."""
        return added([self.decode(part, point) for part in parts], dtype)

    def decode(self, parts: Sequence[Tensor], point: Point) -> Tensor:
        """Return the rows in float32."""
        return parts[0].float()


class HalfWire(SameWire):
    """Implements ``Wire``: rows travel in bfloat16, which rounds those of a float32 model."""

    def encode(self, x: Tensor, point: Point, source: int | None) -> tuple[Tensor, ...]:
        """Return the rows in bfloat16."""
        return (x.bfloat16().contiguous(),)


class ByteWire(SameWire):
    """Implements ``Wire``: a number takes eight bits, and each row has a scale in float32, its largest number / 127."""

    def encode(self, x: Tensor, point: Point, source: int | None) -> tuple[Tensor, ...]:
        """Return codes (T, n) and scales (T, 1)."""
        wide = x.float()
        scale = wide.abs().amax(-1, keepdim=True) / 127
        codes = (wide / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-127, 127)
        return codes.to(torch.int8), scale

    def decode(self, parts: Sequence[Tensor], point: Point) -> Tensor:
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
        raise ConfigError(f"wire is {name!r}{nearest(name, [*WIRES, *FORMS])}")
    return WIRES[name]


def summing_of(wire: Wire, x: Tensor, point: Point, num_ranks: int) -> tuple[Wire, bool]:
    """Return in which form rows (T, n) are summed at a point where ``wire`` is the one for others, and whether in one
    shot.
    """
    chosen = WIRES["same"] if point[1] in EXACT_POINTS else wire
    return chosen, num_ranks <= chosen.most_in_one_shot or x.nbytes <= TWO_SHOT_BYTES or len(x) < num_ranks


def form_of(name: str) -> tuple[str, str | None] | None:
    """Return the calibrated form that a user wrote and the folder behind it ("lowbit=DIR"); None for other forms."""
    form, _, folder = name.partition("=")
    return (form, folder or None) if form in FORMS else None


class LinkedSum:
    """Implements ``Collective`` over the links of a world."""

    def __init__(self, world: World, wire: Wire = WIRES["same"]) -> None:
        """Sum among the ranks of a world, over a wire; all of them make the same calls in the same order."""
        self._world = world
        self.wire = wire
        """The form in which numbers travel."""
        self._count = 0

    def all_reduce(self, x: Tensor, *, point: Point) -> Tensor:
        """Return the sum of all ranks' ``x`` (T, n), which have the same shape, in the dtype of ``x``."""
        site, world, others = point[1], self._world, self._world.others
        wire, in_one_shot = summing_of(self.wire, x, point, world.size)
        if in_one_shot:
            own = wire.encode(x, point, world.rank)
            return wire.added(self._exchanged(own, dict.fromkeys(others, own), site), point, x.dtype)
        rows = [wire.encode(part, point, world.rank) for part in x.tensor_split(world.size)]
        parts = self._exchanged(rows[world.rank], {rank: rows[rank] for rank in others}, site)
        total = wire.encode(wire.added(parts, point, x.dtype), point, None)
        return self._shared_out(total, [len(part[0]) for part in rows], wire, point).to(x.dtype)

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

    def _shared_out(self, own: tuple[Tensor, ...], counts: Sequence[int], wire: Wire, point: Point) -> Tensor:
        """Send the sums of this rank's rows to all others; return all sums in float32, in the order of rows."""
        world, tag = self._world, self._next()
        for rank in world.others:
            world.links.send(rank, tag, *own, purpose=point[1])
        sums = []
        for rank, count in enumerate(counts):
            parts = own if rank == world.rank else tuple(part.new_empty(count, *part.shape[1:]) for part in own)
            if rank != world.rank:
                world.links.receive(rank, tag, *parts)
            sums.append(wire.decode(parts, point))
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


def summed_as_sent(parts: Sequence[Tensor], wire: Wire, point: Point) -> Tensor:
    """Return the sum of all ranks' tensors as ranks get it in one shot, computed in one process."""
    sent = [wire.encode(part, point, rank) for rank, part in enumerate(parts)]
    return wire.added(sent, point, parts[0].dtype)


def summed_in_two_shots(parts: Sequence[Tensor], wire: Wire, point: Point) -> Tensor:
    """Return the same as ranks get it in two shots."""
    slices = zip(*(part.tensor_split(len(parts)) for part in parts), strict=True)
    sums = [wire.encode(summed_as_sent(each, wire, point), point, None) for each in slices]
    return torch.cat([wire.decode(each, point) for each in sums]).to(parts[0].dtype)
