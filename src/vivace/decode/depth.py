"""A forward pass in which a token may exit before the last layer (dynamic depth).

Rows pass the layers from one exit layer to the next. At each, a policy decides which rows exit there and from which
residuals their logits are read; the others continue in a smaller call. A row that exits has no keys and values in the
layers above, although later rows of its sequence read them. There are three policies for these missing entries:

* ``deferred`` (default): the row's residual at the exit is kept (``KVCache.pending``). The next row of the sequence
  that passes that layer takes it along in the same call, so every entry that is ever read is exact.
* ``propagate``: the row's residual at the exit stands in for its input to the layers above, and its keys and values
  there are computed from it at once (CALM, Schuster et al. 2022, arXiv:2207.07061).
* ``mask``: later rows do not attend to it above its exit.

Only the last committed token of a slot may exit early; prompt chunks and guesses pass all layers. This is lossy: a
token that exits may differ from the whole model's, and ``TargetPass.depth`` says how many layers each row passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Draft, TargetPass
from vivace.core.step import Step
from vivace.decode.forward import ForwardPass
from vivace.errors import ConfigError, shown

Missing = Literal["deferred", "propagate", "mask"]
"""What replaces the keys and values above a row's exit."""
DEFAULT_QUALITY = 0.98
"""Agreement of exits with the whole model where none is asked for."""


@dataclass(frozen=True)
class ExitThresholds:
    """Thresholds of all exit layers, calibrated to one stated agreement with the whole model."""

    quality: float
    """The agreement: share of the exiting tokens that are the whole model's."""
    thresholds: tuple[float | None, ...]
    """By exit layer: a token may exit where its score is higher; None lets no token exit there."""

    def __post_init__(self) -> None:
        if not 0 < self.quality < 1:
            raise ConfigError(f"quality must lie between 0 and 1, found {self.quality}")


@dataclass(frozen=True)
class ExitPlan:
    """How to decode with early exits, saved next to the weights that decide about them."""

    RENAMED: ClassVar[Mapping[str, str]] = {"max_late": "max_pending"}
    qualities: tuple[ExitThresholds, ...]
    """Thresholds by stated agreement, calibrated on held-back text."""
    missing: Missing = "deferred"
    """What replaces the keys and values above an exit: ``deferred``, ``propagate`` or ``mask``."""
    max_pending: int = 8
    """With ``deferred``: largest number of tokens of a sequence whose upper layers are pending."""

    def at(self, quality: float | None) -> ExitThresholds:
        """Return the thresholds for an agreement; None stands for the default one.

        Raises:
            ConfigError: the weights were not calibrated to it.
        """
        wanted = DEFAULT_QUALITY if quality is None else quality
        for plan in self.qualities:
            if plan.quality - 1e-9 < wanted < plan.quality + 1e-9:
                return plan
        known = ", ".join(f"{plan.quality:g}" for plan in self.qualities)
        raise ConfigError(f"quality is {shown(wanted)}; the thresholds of this adapter are for {known or 'none'}")


class ExitPolicy(Protocol):
    """Decides which rows exit early."""

    exit_layers: tuple[int, ...]
    """Exit layers in ascending order: number of layers below each. An empty tuple lets no row exit early."""

    def forward(self, model: Decoder, index: int, h: Tensor, step: Step, asking: Tensor) -> EarlyExit:
        """Run rows from the exit layer below (or the embedding) to this one and decide which exit.

        Args:
            model: the decoder.
            index: index of the exit layer, from 0.
            h: (T, E) residuals at the exit layer below.
            step: their call; all rows write keys and values.
            asking: (n,) rows that may exit here.
        """
        ...


@dataclass(frozen=True)
class EarlyExit:
    """What a policy decided at an exit layer."""

    h: Tensor
    """(T, E) residuals at the exit layer."""
    exits: Tensor
    """(n,) bool: which of the asking rows exit."""
    exit_hidden: Tensor
    """(n, E) residuals from which their logits are read."""
    draft_row_layers: int = 0
    """Number of layers that a draft row beside each asking row passed, for the statistics."""


@dataclass(frozen=True)
class ActiveRows:
    """The rows that are still in the forward pass: rows of the draft, and rows whose pending entries are filled."""

    row: list[int]
    """Row of the draft, -1 for a row whose pending entries are filled."""
    slot: list[int]
    position: list[int]
    h: Tensor
    """(T, E)"""

    def take(self, places: Sequence[int]) -> ActiveRows:
        """Return the rows at these places."""
        if len(places) == len(self.row):
            return self
        pick = [self.row[p] for p in places], [self.slot[p] for p in places], [self.position[p] for p in places]
        return ActiveRows(*pick, self.h[torch.tensor(places, dtype=torch.int64, device=self.h.device)])


class Depth:
    """Implements ``Traversal``: rows run from exit layer to exit layer, and those that the policy chooses exit."""

    def __init__(self, policy: ExitPolicy, *, missing: Missing = "deferred", max_pending: int = 8) -> None:
        """Create the forward pass.

        Args:
            policy: decides which rows exit.
            missing: what replaces the entries above a row's exit.
            max_pending: largest number of rows of a sequence with pending entries. When it is reached, the next row
                passes all layers and fills them.
        """
        if missing not in ("deferred", "propagate", "mask"):
            raise ConfigError(f"missing must be deferred, propagate or mask, found {missing!r}")
        if max_pending < 1:
            raise ConfigError(f"max_pending must be at least 1, found {max_pending}")
        self.policy = policy
        self.missing: Missing = missing
        self.max_pending = max_pending

    def run(self, model: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> TargetPass:
        """Run the rows of a draft; every row comes out, after the last layer or at an exit layer."""
        if chunk:
            return ForwardPass().run(model, draft, cache, chunk=True)
        assert draft.is_chain, "a tree's nodes have no place of their own to be late at"
        step = Step.of(draft, cache)
        forward = _GatedForward(self, model, draft, cache, step)
        for index in range(len(self.policy.exit_layers)):
            if not forward.pass_interval(index):
                break
        else:
            forward.finish()
        return TargetPass(forward.out, torch.arange(len(draft.tokens)), forward.depth, forward.work)


class _GatedForward:
    """One pass of ``Depth``."""

    def __init__(self, traversal: Depth, model: Decoder, draft: Draft, cache: KVCache, step: Step) -> None:
        self.traversal, self.model, self.cache = traversal, model, cache
        count = len(draft.tokens)
        h = model.embed(draft.tokens, step)
        self.active = ActiveRows(list(range(count)), draft.lists.slot, step.position.tolist(), h)
        self.step: Step | None = step
        """The call of the active rows; None when it has to be made anew."""
        full = {slot for slot in draft.slots if self._num_pending(slot) >= traversal.max_pending}
        self._root = dict(zip(draft.slots, draft.last_rows, strict=True))
        self.may_exit = {root for slot, root in self._root.items() if slot not in full}
        self.out = torch.empty_like(h)
        self.depth = torch.full((count,), model.config.num_layers)
        self.work = torch.zeros(count, dtype=torch.int64)

    def _num_pending(self, slot: int) -> int:
        return 0 if self.traversal.missing == "mask" else len(self.cache.pending[slot])

    def pass_interval(self, index: int) -> bool:
        """Run the active rows to an exit layer and let rows exit there; return whether any row of the
        draft continues.
        """
        low, high = self._span(index)
        self._join(low)
        asking = [place for place, row in enumerate(self.active.row) if row in self.may_exit]
        step = self._step(low)
        places = torch.tensor(asking, dtype=torch.int64, device=step.device)
        found = self.traversal.policy.forward(self.model, index, self.active.h, step, places)
        self._count_passes(high - low, self.active.slot)
        self._count_passes(found.draft_row_layers, [self.active.slot[place] for place in asking])
        self.active = ActiveRows(self.active.row, self.active.slot, self.active.position, found.h)
        left = [
            (place, exit_hidden)
            for place, exits, exit_hidden in zip(asking, found.exits.tolist(), found.exit_hidden, strict=True)
            if exits
        ]
        if left:
            self._exit(high, left)
        return any(row >= 0 for row in self.active.row)

    def finish(self) -> None:
        """Run the rows that are left through the remaining layers."""
        low = self.traversal.policy.exit_layers[-1] if self.traversal.policy.exit_layers else 0
        self._join(low)
        h = self.model.run(self.active.h, self._step(low), low)
        self._count_passes(self.model.config.num_layers - low, self.active.slot)
        for row, top in zip(self.active.row, h, strict=True):
            if row >= 0:
                self.out[row] = top

    def _span(self, index: int) -> tuple[int, int]:
        exit_layers = self.traversal.policy.exit_layers
        return (exit_layers[index - 1] if index else 0), exit_layers[index]

    def _join(self, low: int) -> None:
        """Add the rows whose pending entries begin at this depth, if a row of their sequence continues."""
        if self.traversal.missing != "deferred" or low == 0:
            return
        w = self.active
        rows, slots, positions, hidden = list(w.row), list(w.slot), list(w.position), [w.h]
        for slot in dict.fromkeys(w.slot):
            if low in self.cache.pending[slot].layers:
                found, residuals = self.cache.pending[slot].take(low)
                rows += [-1] * len(found)
                slots += [slot] * len(found)
                positions += found.tolist()
                hidden.append(residuals)
        if len(rows) > len(w.row):
            self.active, self.step = ActiveRows(rows, slots, positions, torch.cat(hidden)), None

    def _step(self, low: int) -> Step:
        """Return the call of the active rows in the interval that begins at layer ``low``."""
        w = self.active
        if self.traversal.missing == "mask":
            missing = {slot: self.cache.pending[slot].missing(low) for slot in set(w.slot)}
            if any(map(len, missing.values())):
                return Step.at(self.cache, w.slot, w.position, readable=self._readable(missing))
        if self.step is None:
            self.step = Step.at(self.cache, w.slot, w.position)
        return self.step

    def _readable(self, missing: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return the positions that rows of each slot may read: all up to its last one, without those that are
        missing.
        """
        found = {}
        for slot, positions in missing.items():
            ends = [
                position for own, position in zip(self.active.slot, self.active.position, strict=True) if own == slot
            ]
            everything = torch.arange(max(ends) + 1)
            found[slot] = everything[~torch.isin(everything, positions)].to(self.active.h.device)
        return found

    def _exit(self, exit_layer: int, left: Sequence[tuple[int, Tensor]]) -> None:
        """Remove the rows that exit, and rows with pending entries whose sequence does not continue."""
        w, exiting = self.active, {place for place, _ in left}
        for place, hidden in left:
            self.out[w.row[place]] = hidden
            self.depth[w.row[place]] = exit_layer
        going_on = {w.slot[p] for p, row in enumerate(w.row) if row >= 0 and p not in exiting}
        stays = [p for p, slot in enumerate(w.slot) if p in exiting or (w.row[p] < 0 and slot not in going_on)]
        if self.traversal.missing == "propagate":
            exit_hidden = torch.stack([hidden for _, hidden in sorted(left, key=_place)])
            self._propagate(exit_layer, w.take(sorted(exiting)), exit_hidden)
        else:
            for slot in dict.fromkeys(w.slot[p] for p in stays):
                own = [p for p in stays if w.slot[p] == slot]
                positions = torch.tensor([w.position[p] for p in own])
                self.cache.pending[slot].add(exit_layer, positions, w.h[torch.tensor(own, device=w.h.device)])
        gone = set(stays)
        self.active, self.step = w.take([p for p in range(len(w.row)) if p not in gone]), None

    def _propagate(self, exit_layer: int, gone: ActiveRows, exit_hidden: Tensor) -> None:
        """Store keys and values above the exit, computed from the residuals at the exit."""
        step = Step.at(self.cache, gone.slot, gone.position)
        for layer in range(exit_layer, self.model.config.num_layers):
            self.model.store(exit_hidden, step, layer)

    def _count_passes(self, layers: int, slots: Sequence[int]) -> None:
        """Add layer passes for a row of each of these slots to the count of the slot's last committed row."""
        for slot in slots:
            self.work[self._root[slot]] += layers


def _place(left: tuple[int, Tensor]) -> int:
    return left[0]
