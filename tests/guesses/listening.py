"""Hears what drafters propose and what their guesses were read from, without changing either.

A session decodes as ever. Around it stand a drafter that notes each draft, and ears on the places where guesses are
read: the heads of decoders and of Medusa. What an ear hears is in the order in which guesses were made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.decode.wrapped import Wrapped, WrappedState
from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Context, Decided, Draft
from vivace.methods.medusa.drafter import Medusa


@dataclass
class Ears:
    """Rows (n, E) that guesses were read from, while they are open; each call to a head is one entry."""

    rows: list[Tensor] = field(default_factory=list)
    is_open: bool = False
    inside: bool = False

    @contextmanager
    def listening(self) -> Iterator[list[Tensor]]:
        """What is heard from here on."""
        self.rows, self.is_open = [], True
        try:
            yield self.rows
        finally:
            self.is_open = False

    def put_on(self, patch: pytest.MonkeyPatch) -> None:
        """Hear every decoder's head, and the normed residuals that Medusa's heads read."""
        for kind, name, place in ((Decoder, "head", 1), (Decoder, "greedy", 1), (Medusa, "trees", 1)):
            patch.setattr(kind, name, self._heard(getattr(kind, name), place))

    def _heard(self, of: Any, place: int) -> Any:
        def call(*args: Any, **fields: Any) -> Any:
            outer = not self.inside  # greedy asks the head, and Medusa's tree may, too
            if self.is_open and outer:
                self.rows.append(args[place].detach().clone())
            self.inside = True
            try:
                return of(*args, **fields)
            finally:
                self.inside = not outer

        return call


@dataclass(frozen=True)
class Proposal:
    """What was proposed for one slot."""

    text: tuple[int, ...]
    """All decided tokens; the last one is the root."""
    guesses: Mapping[tuple[int, ...], tuple[int, ...]]
    """By path from the root: the tokens that were guessed behind it, likeliest first."""
    rows: Mapping[tuple[int, ...], Tensor]
    """By the same paths, what the guesses were read from (E,); empty where nobody could hear it."""
    handed: Mapping[tuple[int, ...], Tensor]
    """By the path to a node, its own token included: the residual that is handed over to verification, (E,)."""
    entry_layer: int
    """Layers below it."""


@dataclass(eq=False)
class Listening(Wrapped):
    """Fills ``Drafter``: another one, and what it proposed."""

    ears: Ears
    by_level: bool = False
    """Guesses at a depth are read from one row, whatever path leads there."""
    repeats: bool = False
    """Where a text repeats itself what followed is the draft, and no row is read."""
    heard: list[Proposal] = field(default_factory=list)

    def open(self, cache: KVCache) -> Any:
        """Return a state whose proposals are heard here."""
        return _State(self, self.drafter.open(cache))


class _State(WrappedState):
    def __init__(self, of: Listening, state: Any) -> None:
        super().__init__(state)
        self._of = of

    def propose(self, context: Context) -> Draft | Decided:
        with self._of.ears.listening() as rows:
            proposed: Draft | Decided = self._state.propose(context)
        if isinstance(proposed, Draft):  # no draft is left of steps that were verified meanwhile
            self._of.heard += _proposals(context, proposed, rows, self._of)
        return proposed


def repeated(text: Sequence[int], count: int = 5) -> tuple[int, ...]:
    """What followed the last three tokens of a text where they stood before, or its last two; the latest place."""
    for size in (3, 2):
        for start in range(len(text) - size - 1, -1, -1):
            if tuple(text[start : start + size]) == tuple(text[-size:]):
                return tuple(text[start + size :][:count])
    return ()


def _proposals(context: Context, draft: Draft, rows: Sequence[Tensor], of: Listening) -> list[Proposal]:
    """One for each slot that has guesses, with the rows they were read from."""
    tokens, slots, nodes, parents = draft.lists
    roots = dict(zip(draft.slots, draft.last_rows, strict=True))
    path_of: dict[int, tuple[int, ...]] = dict.fromkeys(roots.values(), ())
    guesses: dict[int, dict[tuple[int, ...], tuple[int, ...]]] = {slot: {} for slot in draft.slots}
    order: list[tuple[int, tuple[int, ...]]] = []
    given = dict(zip(draft.slots, draft.committed, strict=True))
    for row, (token, slot, node, parent) in enumerate(zip(tokens, slots, nodes, parents, strict=True)):
        if node < given[slot]:
            continue
        path = path_of[parent]
        path_of[row] = (*path, token)
        if path not in guesses[slot] and not (of.repeats and repeated(context.tokens[slot])):
            order.append((slot, path))
        guesses[slot][path] = (*guesses[slot].get(path, ()), token)
    found = _by_level(guesses, rows) if of.by_level else _by_path(order, rows)
    handed = [] if draft.hidden is None else [(slots[row], path_of[row], draft.hidden[row].clone()) for row in path_of]
    return [
        Proposal(
            tuple(context.tokens[slot]),
            guesses[slot],
            {path: row for (its, path), row in found.items() if its == slot},
            {path: row for its, path, row in handed if its == slot},
            draft.entry_layer,
        )
        for slot in draft.slots
        if guesses[slot]
    ]


def _by_path(order: Sequence[tuple[int, tuple[int, ...]]], rows: Sequence[Tensor]) -> dict[Any, Tensor]:
    """Rows are read parent by parent, in the order in which their children stand in the draft."""
    flat = torch.cat(list(rows)) if rows else torch.zeros(0, 1)
    assert len(flat) in (0, len(order)), "whoever reads a row guesses behind it"
    return dict(zip(order, flat, strict=False))


def _by_level(guesses: Mapping[int, Mapping[tuple[int, ...], Any]], rows: Sequence[Tensor]) -> dict[Any, Tensor]:
    """Rows are read slot by slot; one row for every level, or one for all of them."""
    slots = [slot for slot, paths in guesses.items() if paths]
    if not rows:
        return {}
    (flat,) = rows
    assert len(flat) % len(slots) == 0, "every slot that guesses has as many rows"
    each = len(flat) // len(slots)
    return {
        (slot, path): flat[place * each + min(len(path), each - 1)]
        for place, slot in enumerate(slots)
        for path in guesses[slot]
    }
