"""The neurons of one layer that are in memory: those of the last few tokens (Alizadeh et al. 2023, arXiv:2312.11514).

Memory is allocated once. Records lie side by side in its first ``num_used`` rows, in any order, so that the
feed-forward runs over one block: a record that leaves is overwritten by one of the last, and new ones are appended
(section 3.3 of the paper). Where room is short, the neurons that the window used least leave first (ours; in the paper
whole tokens leave). What does not fit even so is listed in ``excess``, for the caller to read and to drop after use.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from vivace.storage.io.readers import aligned


class Runs(NamedTuple):
    """Runs of neighbouring records in the file that go to neighbouring rows; each field is (n,) int64."""

    neurons: Tensor
    """The first neuron of each run."""
    rows: Tensor
    """The row that it goes to."""
    lengths: Tensor
    """Neurons of each run."""

    def extents(self, offset: int, stride: int) -> Tensor:
        """Return (n, 3): offset in the file, in memory, bytes; records of ``stride`` bytes begin at ``offset``."""
        places = torch.stack([self.neurons, self.rows, self.lengths], dim=1) * stride
        places[:, 0] += offset
        return places


class Window(NamedTuple):
    """What a cache held, so that it can be restored."""

    neurons: Tensor
    """(n,) int64, the neuron of each row."""
    recent: tuple[Tensor, ...]
    """The active sets, the oldest first."""


class NeuronCache:
    """Rows for ``room`` of ``count`` neurons, and a window over the last ``window`` active sets."""

    def __init__(self, count: int, room: int, stride: int, window: int) -> None:
        """Allocate the rows.

        Args:
            count: F, the neurons of the layer.
            room: neurons in memory at most.
            stride: bytes of a record.
            window: active sets whose neurons stay in memory, where room is not short.
        """
        self.room = room
        self.window = window
        self.stride = stride
        self.memory = aligned(room * stride)
        self.rows = torch.frombuffer(self.memory, dtype=torch.uint8).view(room, stride)
        """(room, stride) uint8."""
        self.pointer = torch.zeros(room, dtype=torch.int64)
        """(room,) the neuron of each row; valid in the first ``num_used`` rows."""
        self.row_of = torch.full((count,), -1, dtype=torch.int64)
        """(F,) the row of each neuron, -1 for those not in memory."""
        self.uses = torch.zeros(count, dtype=torch.int32)
        """(F,) how many active sets of the window contain each neuron."""
        self.num_used = 0
        self.num_moved = 0
        """Rows that were copied to fill holes, since the beginning."""
        self.excess = self.pointer[:0]
        """(n,) neurons of the last active set for which there was no room; they are in no window."""
        self._recent: deque[Tensor] = deque()

    @property
    def recent(self) -> tuple[Tensor, ...]:
        """The active sets of the window, the oldest first, without neurons that left early."""
        return tuple(self._recent)

    def turn(self, active: Tensor) -> Runs:
        """Add an active set to the window, and drop the oldest.

        Args:
            active: (n,) neurons in ascending order; those that do not fit are in ``excess`` afterwards.

        Returns:
            What must be read into ``memory``; call ``forget`` if that fails.
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
        """Drop up to ``count`` neurons that are not active now, the least used first, and return how many."""
        rows = self.pointer[: self.num_used]
        idle = self.uses[rows].clone()
        idle[self.row_of[active[self.row_of[active] >= 0]]] = 0
        places = idle.nonzero()[:, 0]
        leaving = rows[places[idle[places].argsort(stable=True)[:count]]]
        self._strike(leaving)
        return len(leaving)

    def _strike(self, neurons: Tensor) -> None:
        """Take neurons out of all active sets of the window."""
        self.uses[neurons] = 0
        self._recent = deque(each[self.uses[each] > 0] for each in self._recent)

    def _compact(self, alive: Tensor) -> None:
        """Remove the rows that are not ``alive`` (num_used,), and fill the holes with the last rows."""
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
        """Return what is in memory now."""
        return Window(self.pointer[: self.num_used].clone(), self.recent)

    def restore(self, window: Window) -> Runs:
        """Hold again, row by row, what ``held`` returned, and return what must be read into ``memory``."""
        self.forget()
        self.num_used = len(window.neurons)
        self.pointer[: self.num_used] = window.neurons
        self.row_of[window.neurons] = torch.arange(self.num_used)
        self._recent.extend(window.recent)
        for active in window.recent:
            self.uses[active] += 1
        return runs(window.neurons, 0)

    def forget(self) -> None:
        """Empty the cache: another sequence begins, or a read failed."""
        self.row_of.fill_(-1)
        self.uses.zero_()
        self._recent.clear()
        self.num_used = 0


def _together(*places: Tensor) -> tuple[Tensor, Tensor]:
    """Find runs in which all ``places``, each (n,) ascending, increase by one: where each begins, and its length."""
    count = len(places[0])
    is_first = torch.ones(count, dtype=torch.bool)
    if count:
        is_first[1:] = torch.stack([each.diff() != 1 for each in places]).any(0)
    firsts = is_first.nonzero()[:, 0]
    return firsts, torch.diff(firsts, append=torch.tensor([count]))


def runs(neurons: Tensor, first_row: int) -> Runs:
    """Group ``neurons`` (n,), which go to the rows from ``first_row`` on, into runs of neighbours in the file."""
    firsts, lengths = _together(neurons)
    return Runs(neurons[firsts], first_row + firsts, lengths)
