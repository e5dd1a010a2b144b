"""The neurons of one layer that are in memory: those of the last few tokens (Alizadeh et al. 2023, arXiv:2312.11514).

Memory is taken once. Records lie side by side in its first ``num_used`` rows in any order, so that the feed-forward
runs over one block: what leaves is overwritten by the last rows, what comes is appended (section 3.3 of the paper).

Where room is short those leave that the window used least (ours; whole tokens leave in the paper), and what does not
fit even so is for the caller to read and to forget.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from vivace.storage.readers import aligned


class Runs(NamedTuple):
    """Neighbouring records of the file that belong into neighbouring rows: (n,) each."""

    neurons: Tensor
    """The first of each run."""
    rows: Tensor
    """Where it goes."""
    lengths: Tensor

    def extents(self, offset: int, stride: int) -> Tensor:
        """(n, 3): places in the file, places in memory and bytes, of records of ``stride`` bytes from ``offset`` on."""
        places = torch.stack([self.neurons, self.rows, self.lengths], dim=1) * stride
        places[:, 0] += offset
        return places


class Window(NamedTuple):
    """What a cache held, to be brought back later."""

    neurons: Tensor
    """(n,) the neuron of each row."""
    recent: tuple[Tensor, ...]
    """The active sets, the oldest first."""


class NeuronCache:
    """Rows for ``room`` of ``count`` neurons, and a window over the last ``window`` sets that were active."""

    def __init__(self, count: int, room: int, stride: int, window: int) -> None:
        """Allocate.

        Args:
            count: neurons of the layer, F.
            room: of them in memory at most.
            stride: bytes of a record.
            window: active sets that stay in memory; neurons used least leave earlier where room is short.
        """
        self.room = room
        self.window = window
        self.stride = stride
        self.memory = aligned(room * stride)
        self.rows = torch.frombuffer(self.memory, dtype=torch.uint8).view(room, stride)
        """(room, stride) uint8."""
        self.pointer = torch.zeros(room, dtype=torch.int64)
        """(room,) neuron of each row; only the first ``num_used`` mean something."""
        self.row_of = torch.full((count,), -1, dtype=torch.int64)
        """(F,) row of each neuron, -1 for those not in memory."""
        self.uses = torch.zeros(count, dtype=torch.int32)
        """(F,) active sets of the window that hold a neuron."""
        self.num_used = 0
        self.num_moved = 0
        """Rows copied to fill holes, since the beginning."""
        self.excess = self.pointer[:0]
        """(n,) of the last active set, what has no room; in no window."""
        self._recent: deque[Tensor] = deque()

    @property
    def recent(self) -> tuple[Tensor, ...]:
        """The active sets of the window, the oldest first, without what left early."""
        return tuple(self._recent)

    def turn(self, active: Tensor) -> Runs:
        """Move the window on.

        Args:
            active: (n,) neurons, ascending; those that do not fit are in ``excess`` afterwards.

        Returns:
            What must be read into ``memory``; if that fails, ``forget`` says so.
        """
        self._recent.append(active)
        self.uses[active] += 1
        while len(self._recent) > self.window:
            self.uses[self._recent.popleft()] -= 1
        fresh = active[self.row_of[active] < 0]
        alive = self.uses[self.pointer[: self.num_used]] > 0
        over = int(alive.sum()) + len(fresh) - self.room
        self.excess = fresh[:0]
        if over > 0:
            over -= self._evict(active, over)
            fresh, self.excess = fresh[: len(fresh) - max(0, over)], fresh[len(fresh) - max(0, over) :]
            self._strike(self.excess)
            alive = self.uses[self.pointer[: self.num_used]] > 0
        self._compact(alive)
        first = self.num_used
        self.num_used += len(fresh)
        rows = torch.arange(first, self.num_used)
        self.pointer[rows] = fresh
        self.row_of[fresh] = rows
        return runs(fresh, first)

    def _evict(self, active: Tensor, count: int) -> int:
        """Strike at most ``count`` neurons that are not active now, least used first; returns how many there were."""
        rows = self.pointer[: self.num_used]
        idle = self.uses[rows].clone()
        idle[self.row_of[active[self.row_of[active] >= 0]]] = 0
        places = idle.nonzero()[:, 0]
        leaving = rows[places[idle[places].argsort(stable=True)[:count]]]
        self._strike(leaving)
        return len(leaving)

    def _strike(self, neurons: Tensor) -> None:
        """Take neurons out of the window."""
        self.uses[neurons] = 0
        self._recent = deque(each[self.uses[each] > 0] for each in self._recent)

    def _compact(self, alive: Tensor) -> None:
        """Rows that are not alive go; the last rows fill the holes."""
        kept = int(alive.sum())
        if kept == self.num_used:
            return
        self.row_of[self.pointer[: self.num_used][~alive]] = -1
        holes = (~alive[:kept]).nonzero()[:, 0]
        movers = alive[kept:].nonzero()[:, 0] + kept
        firsts, lengths = _together(holes, movers)
        moves = torch.stack([holes[firsts], movers[firsts], lengths], dim=1) * self.stride
        for target, source, size in moves.tolist():
            self.memory[target : target + size] = self.memory[source : source + size]
        self.pointer[holes] = self.pointer[movers]
        self.row_of[self.pointer[holes]] = holes
        self.num_moved += len(holes)
        self.num_used = kept

    def held(self) -> Window:
        """What is held now."""
        return Window(self.pointer[: self.num_used].clone(), self.recent)

    def restore(self, window: Window) -> Runs:
        """Hold again, row by row, what was held before, and nothing else; returns what must be read into ``memory``."""
        self.forget()
        self.num_used = len(window.neurons)
        self.pointer[: self.num_used] = window.neurons
        self.row_of[window.neurons] = torch.arange(self.num_used)
        self._recent.extend(window.recent)
        for active in window.recent:
            self.uses[active] += 1
        return runs(window.neurons, 0)

    def forget(self) -> None:
        """Nothing is in memory any more: another sequence begins, or a read failed."""
        self.row_of.fill_(-1)
        self.uses.zero_()
        self._recent.clear()
        self.num_used = 0


def _together(*places: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending places (n,) side by side: which of them begin a stretch of neighbours in all, and its length."""
    count = len(places[0])
    is_first = torch.ones(count, dtype=torch.bool)
    if count:
        is_first[1:] = torch.stack([each.diff() != 1 for each in places]).any(0)
    firsts = is_first.nonzero()[:, 0]
    return firsts, torch.diff(firsts, append=torch.tensor([count]))


def runs(neurons: Tensor, first_row: int) -> Runs:
    """Neurons (n,) that go into rows from ``first_row`` on, neighbours in the file and in memory together."""
    firsts, lengths = _together(neurons)
    return Runs(neurons[firsts], first_row + firsts, lengths)
