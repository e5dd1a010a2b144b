"""Sums over ranks that are threads of one process: they meet, one of them adds, and all take the result.

What is added is what the links of real ranks would carry: every rank encodes its rows, and nobody sees them as they
were. ``LinkedSum`` lets each rank decode and add all payloads, and all come to the same bits; here that is done once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vivace.core.summed import Point
from vivace.errors import WorldError
from vivace.parallel.collective import WIRES, Wire, summing_of
from vivace.parallel.links import LOOK_S
from vivace.parallel.world import World

Work = Callable[[Sequence[Any]], Any]


class Meeting:
    """Where threads bring something each, and take what one of them makes of all."""

    def __init__(self, size: int) -> None:
        """Expect so many threads."""
        self._size = size
        self._changed = threading.Condition()
        self._brought: dict[int, Any] = {}
        self._turn = 0
        self._made: Any = None
        self._work: Work = list

    def meet(self, rank: int, what: object, work: Work, look: Callable[[], None]) -> Any:
        """Bring something and wait for the others; return what ``work`` makes of it all, in the order of ranks.

        Args:
            rank: of the calling thread.
            what: it brings.
            work: that of rank 0 is called, by the last that comes; those of the others would make the same.
            look: called now and then while others are awaited; it raises an error where they cannot come any more.

        Raises:
            WorldError: a thread came twice, so that they are out of step, or ``look`` raised it.
        """
        with self._changed:
            if rank in self._brought:
                raise WorldError(f"rank {rank} has left a sum and begun another; the ranks are out of step")
            turn = self._turn
            self._brought[rank] = what
            if rank == 0:
                self._work = work
            if len(self._brought) == self._size:
                self._made = self._work([self._brought[number] for number in range(self._size)])
                self._brought = {}
                self._turn += 1
                self._changed.notify_all()
            while self._turn == turn:
                if not self._changed.wait(LOOK_S):
                    look()
            return self._made


class MetSum:
    """Implements ``Collective`` among threads that meet."""

    def __init__(self, world: World, meeting: Meeting, wire: Wire = WIRES["same"]) -> None:
        """Sum among the ranks of a world, which all meet there."""
        self._world = world
        self._meeting = meeting
        self.wire = wire
        """The form in which numbers would travel."""

    def all_reduce(self, x: Tensor, *, point: Point) -> Tensor:
        """Return the sum of all ranks' ``x`` (T, n), which have the same shape, in the dtype of ``x``."""
        rank, size = self._world.rank, self._world.size
        wire, in_one_shot = summing_of(self.wire, x, point, size)
        if in_one_shot:
            total: Tensor = self._meet(wire.encode(x, point, rank), lambda sent: wire.added(sent, point, x.dtype))
            return total.clone()  # to which a rank may add
        rows = [wire.encode(part, point, rank) for part in x.tensor_split(size)]
        sent: list[Any] = self._meet(rows, list)
        own = wire.added([parts[rank] for parts in sent], point, x.dtype)
        total = self._meet(
            wire.encode(own, point, None),
            lambda totals: torch.cat([wire.decode(each, point) for each in totals]).to(x.dtype),
        )
        return total.clone()

    def _meet(self, what: object, work: Work) -> Any:
        """Return what rank 0's ``work`` makes of what all ranks bring."""
        return self._meeting.meet(self._world.rank, what, work, self._world.links.look)
