"""A way up on which a token may leave before the top: dynamic depth.

Rows climb from gate to gate. At each a policy says which of them may leave and what their logits are read from; the
others go on, alone (the call is compacted). Above its gate a row that left has no keys and values, which later rows
of its sequence would read. Three answers:

* ``deferred`` (default): its residual at the gate is kept (``KVCache.late``). The next row of the sequence that goes
  past that gate takes it along, one call for both, so that every entry that is ever read is exact.
* ``propagate``: its residual at the gate is taken for what would have entered the layers above, and their keys and
  values are made from that at once (CALM, Schuster et al. 2022, arXiv:2207.07061).
* ``mask``: later rows do not see it above its gate.

Only a slot's root may leave; prompt chunks and guesses go to the top. A lossy way up: what leaves may differ from
what the whole model would have said, and ``TargetPass.depth`` says where each row left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from vivace.core.cache import KVCache, PendingKV
from vivace.core.model import Decoder
from vivace.core.seams import Draft, TargetPass
from vivace.core.step import Step
from vivace.decode.forward import ForwardPass
from vivace.errors import ConfigError

Missing = Literal["deferred", "propagate", "mask"]
"""What stands for the entries above a row's exit."""
DEFAULT_QUALITY = 0.98
"""Agreement of exits where nobody says."""


class Calibrated(Protocol):
    """Thresholds for one stated agreement."""

    @property
    def quality(self) -> float:
        """The agreement."""
        ...


P = TypeVar("P", bound=Calibrated)


def at_quality(plans: Sequence[P], quality: float | None) -> P:
    """The thresholds for an agreement; None is the default one.

    Raises:
        ConfigError: the adapter was not calibrated to it.
    """
    wanted = DEFAULT_QUALITY if quality is None else quality
    for plan in plans:
        if abs(plan.quality - wanted) < 1e-9:
            return plan
    known = ", ".join(f"{plan.quality:g}" for plan in plans)
    raise ConfigError(f"quality is {wanted:g}; the thresholds of this adapter are for {known or 'none'}")


class ExitPolicy(Protocol):
    """Who may leave."""

    gates: tuple[int, ...]
    """Layers below each gate at which rows may leave, ascending; none sends all to the top."""

    def forward(self, model: Decoder, gate: int, h: Tensor, step: Step, asking: Tensor) -> EarlyExit:
        """Rows from the gate below (or the embedding) to this one.

        Args:
            model: the decoder.
            gate: number of the gate, from 0.
            h: (T, E) rows at the gate below.
            step: their call; all of them write.
            asking: (n,) rows that may leave here.
        """
        ...


@dataclass(frozen=True)
class EarlyExit:
    """What a policy decided at a gate."""

    h: Tensor
    """(T, E) residuals at the gate."""
    exits: Tensor
    """(n,) bool: which of the asking rows leave."""
    says: Tensor
    """(n, E) what their logits are read from."""
    draft_row_layers: int = 0
    """Layers through which a further row went along with each asking one, for the books."""


@dataclass(frozen=True)
class ActiveRows:
    """Rows on their way up: those of the draft, and late ones that came along."""

    row: list[int]
    """Draft row, -1 for a late one."""
    slot: list[int]
    position: list[int]
    h: Tensor
    """(T, E)"""

    def take(self, places: Sequence[int]) -> ActiveRows:
        """Some of them."""
        if len(places) == len(self.row):
            return self
        pick = [self.row[p] for p in places], [self.slot[p] for p in places], [self.position[p] for p in places]
        return ActiveRows(*pick, self.h[torch.tensor(places, dtype=torch.int64, device=self.h.device)])


class Depth:
    """Fills ``Traversal``: from gate to gate, whoever is sure leaves."""

    def __init__(self, policy: ExitPolicy, *, missing: Missing = "deferred", max_late: int = 8) -> None:
        """Take rows up by a policy.

        Args:
            policy: who may leave.
            missing: what stands for the entries above a row's exit.
            max_late: rows a sequence may owe; then its next one goes to the top and takes them along.
        """
        if missing not in ("deferred", "propagate", "mask"):
            raise ConfigError(f"missing must be deferred, propagate or mask, found {missing!r}")
        if max_late < 1:
            raise ConfigError(f"max_late must be at least 1, found {max_late}")
        self.policy = policy
        self.missing: Missing = missing
        self.max_late = max_late

    def run(self, model: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> TargetPass:
        """Take the rows up; all of them come out, at the top or at a gate."""
        if chunk:
            return ForwardPass().run(model, draft, cache, chunk=True)
        assert draft.is_chain, "a tree's nodes have no place of their own to be late at"
        step = Step.of(draft, cache)
        forward = _GatedForward(self, model, draft, cache, step)
        for gate in range(len(self.policy.gates)):
            if not forward.pass_interval(gate):
                break
        else:
            forward.finish()
        return TargetPass(forward.out, torch.arange(len(draft.tokens)), forward.depth, forward.work)


class _GatedForward:
    """One pass of ``Depth``."""

    def __init__(self, way: Depth, model: Decoder, draft: Draft, cache: KVCache, step: Step) -> None:
        self.way, self.model, self.cache = way, model, cache
        count = len(draft.tokens)
        h = model.embed(draft.tokens, step)
        self.walkers = ActiveRows(list(range(count)), draft.lists.slot, step.position.tolist(), h)
        self.step: Step | None = step
        """Of the walkers; None when it has to be made."""
        full = {slot for slot in draft.slots if self._owed(slot) >= way.max_late}
        self._root = dict(zip(draft.slots, draft.last_rows, strict=True))
        self.may_leave = {root for slot, root in self._root.items() if slot not in full}
        self.out = torch.empty_like(h)
        self.depth = torch.full((count,), model.config.num_layers)
        self.work = torch.zeros(count, dtype=torch.int64)

    def _owed(self, slot: int) -> int:
        return 0 if self.way.missing == "mask" else len(self.cache.pending[slot])

    def pass_interval(self, gate: int) -> bool:
        """Up to a gate; whether anybody goes on."""
        low, high = self._span(gate)
        self._join(low)
        asking = [place for place, row in enumerate(self.walkers.row) if row in self.may_leave]
        step = self._step(low)
        places = torch.tensor(asking, dtype=torch.int64, device=step.device)
        went = self.way.policy.forward(self.model, gate, self.walkers.h, step, places)
        self._book(high - low, self.walkers.slot)
        self._book(went.draft_row_layers, [self.walkers.slot[place] for place in asking])
        self.walkers = ActiveRows(self.walkers.row, self.walkers.slot, self.walkers.position, went.h)
        left = [
            (place, says) for place, exits, says in zip(asking, went.exits.tolist(), went.says, strict=True) if exits
        ]
        if left:
            self._leave(high, left)
        return any(row >= 0 for row in self.walkers.row)

    def finish(self) -> None:
        """The rows that are left, to the top."""
        low = self.way.policy.gates[-1] if self.way.policy.gates else 0
        self._join(low)
        h = self.model.run(self.walkers.h, self._step(low), low)
        self._book(self.model.config.num_layers - low, self.walkers.slot)
        for row, top in zip(self.walkers.row, h, strict=True):
            if row >= 0:
                self.out[row] = top

    def _span(self, gate: int) -> tuple[int, int]:
        gates = self.way.policy.gates
        return (gates[gate - 1] if gate else 0), gates[gate]

    def _join(self, low: int) -> None:
        """Late rows that wait at this depth go along with the next row of their sequence."""
        if self.way.missing != "deferred" or low == 0:
            return
        w = self.walkers
        rows, slots, positions, hidden = list(w.row), list(w.slot), list(w.position), [w.h]
        for slot in dict.fromkeys(w.slot):
            for pending in [pending for pending in self.cache.pending[slot] if pending.layer == low]:
                self.cache.pending[slot].remove(pending)
                rows.append(-1)
                slots.append(slot)
                positions.append(pending.position)
                hidden.append(pending.hidden[None])
        if len(rows) > len(w.row):
            self.walkers, self.step = ActiveRows(rows, slots, positions, torch.cat(hidden)), None

    def _step(self, low: int) -> Step:
        """The call of the walkers in the interval that begins at ``low``."""
        w = self.walkers
        if self.way.missing == "mask":
            holes = {
                s: {pending.position for pending in self.cache.pending[s] if pending.layer <= low} for s in set(w.slot)
            }
            return Step.at(self.cache, w.slot, w.position, holes=holes)
        if self.step is None:
            self.step = Step.at(self.cache, w.slot, w.position)
        return self.step

    def _leave(self, gate: int, left: Sequence[tuple[int, Tensor]]) -> None:
        """Take rows out of the climb at a gate, and late ones whose sequence goes no further."""
        w, leaving = self.walkers, {place for place, _ in left}
        for place, says in left:
            self.out[w.row[place]] = says
            self.depth[w.row[place]] = gate
        going_on = {w.slot[p] for p, row in enumerate(w.row) if row >= 0 and p not in leaving}
        stays = [p for p, slot in enumerate(w.slot) if p in leaving or (w.row[p] < 0 and slot not in going_on)]
        if self.way.missing == "propagate":
            self._propagate(gate, w.take(sorted(leaving)), torch.stack([says for _, says in sorted(left, key=_place)]))
        else:
            for p in sorted(stays, key=lambda p: w.position[p]):
                self.cache.pending[w.slot[p]].append(PendingKV(w.position[p], gate, w.h[p]))
        gone = set(stays)
        self.walkers, self.step = w.take([p for p in range(len(w.row)) if p not in gone]), None

    def _propagate(self, gate: int, gone: ActiveRows, says: Tensor) -> None:
        """Keys and values above the gate from what the rows said there."""
        step = Step.at(self.cache, gone.slot, gone.position)
        for layer in range(gate, self.model.config.num_layers):
            self.model.store(says, step, layer)

    def _book(self, layers: int, slots: Sequence[int]) -> None:
        """Layer passes of a row of each of these slots, companions and late rows included, under its root."""
        for slot in slots:
            self.work[self._root[slot]] += layers


def _place(left: tuple[int, Tensor]) -> int:
    return left[0]
