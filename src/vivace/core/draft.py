"""What drafters propose and what verification makes of it: values that pass between a method and the session.

A ``Draft`` is a tree of nodes per slot, as rows; ``TargetPass`` is what came out of the model for them; a ``Verdict``
says which rows stay. ``Decided`` stands for a draft and its verdict together, where native code has made both. The
words are those of ``seams.py``, whose interfaces exchange these values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class RowLists(NamedTuple):
    """The rows of a ``Draft`` as Python lists."""

    tokens: list[int]
    slot: list[int]
    node: list[int]
    parent: list[int]


class RowPlaces(NamedTuple):
    """Where the rows of a ``Draft`` stand, as Python lists."""

    slot: list[int]
    node: list[int]
    parent: list[int]


@dataclass(frozen=True)
class Draft:
    """Tokens to run, as rows; rows are only ever appended."""

    slots: tuple[int, ...]
    committed: tuple[int, ...]
    """Number of committed tokens at the front of each slot's nodes; the last of them is the root."""
    tokens: Tensor
    """(T,) token of each row."""
    slot: Tensor
    """(T,) slot of each row."""
    node: Tensor
    """(T,) number of the row within its slot, 0 for the first committed token."""
    parent: Tensor
    """(T,) row of the parent, -1 for a slot's first row."""
    probs: Tensor | None = None
    """(T, V) distribution from which each guess was drawn, processors applied; None when guesses are deterministic."""
    hidden: Tensor | None = None
    """(T, E) residuals entering ``entry_layer``: the layers below have run and stored their entries."""
    entry_layer: int = 0
    is_prompt: bool = False
    """Whether the rows are of prompts, after which no token is decided."""
    known: RowLists | None = None
    """The rows as Python lists, where they were made from such; of the tokens those of the first rows may be enough.
    Nothing that is known has to be read from a GPU, which waits each time."""

    @staticmethod
    def committed_only(
        tokens: Mapping[int, Sequence[int]], *, is_prompt: bool = False, device: torch.device | None = None
    ) -> Draft:
        """Return a draft of committed tokens per slot without guesses: plain decoding, or a prompt chunk."""
        slots = tuple(tokens)
        flat: list[int] = []
        slot: list[int] = []
        node: list[int] = []
        parent: list[int] = []
        for index, committed in tokens.items():
            for place, token in enumerate(committed):
                parent.append(len(flat) - 1 if place else -1)
                flat.append(token)
                slot.append(index)
                node.append(place)
        counts = tuple(len(tokens[s]) for s in slots)
        return Draft(
            slots,
            counts,
            tokens=torch.tensor(flat, dtype=torch.int64, device=device),
            slot=torch.tensor(slot, dtype=torch.int64, device=device),
            node=torch.tensor(node, dtype=torch.int64, device=device),
            parent=torch.tensor(parent, dtype=torch.int64, device=device),
            is_prompt=is_prompt,
            known=RowLists(flat, slot, node, parent),
        )

    @property
    def device(self) -> torch.device:
        """Return the device of the rows, which is the model's."""
        return self.tokens.device

    @cached_property
    def lists(self) -> RowLists:
        """Return the rows as Python lists; what is not known of them is read from the device once."""
        if self.known is None:
            return RowLists(self.tokens.tolist(), self.slot.tolist(), self.node.tolist(), self.parent.tolist())
        tokens = self.known.tokens
        if len(tokens) < len(self.tokens):
            tokens = tokens + self.tokens[len(tokens) :].tolist()
        return self.known._replace(tokens=tokens)

    @cached_property
    def places(self) -> RowPlaces:
        """Return ``lists`` without the tokens, so that guesses need not be known."""
        known = self.lists if self.known is None else self.known
        return RowPlaces(known.slot, known.node, known.parent)

    @cached_property
    def is_chain(self) -> bool:
        """Return whether the nodes of every slot follow one another without a branch."""
        last: dict[int, int] = {}
        for row, (slot, parent) in enumerate(zip(self.places.slot, self.places.parent, strict=True)):
            if last.get(slot, -1) != parent:
                return False
            last[slot] = row
        return True

    @cached_property
    def depths(self) -> list[int]:
        """Return the number of edges between each row and its slot's root, 0 for committed rows."""
        committed = dict(zip(self.slots, self.committed, strict=True))
        depths: list[int] = []
        for slot, node, parent in zip(*self.places, strict=True):
            depths.append(0 if node < committed[slot] else depths[parent] + 1)
        return depths

    @cached_property
    def last_rows(self) -> list[int]:
        """Return the row of each slot's root, in the order of ``slots``."""
        last = {slot: committed - 1 for slot, committed in zip(self.slots, self.committed, strict=True)}
        nodes = zip(self.places.slot, self.places.node, strict=True)
        row_of = {slot: row for row, (slot, node) in enumerate(nodes) if node == last[slot]}
        return [row_of[slot] for slot in self.slots]

    def last_committed(self) -> Tensor:
        """Return ``last_rows`` as indices, (number of slots,)."""
        return torch.tensor(self.last_rows, device=self.device)

    def grow(self, leaves: Tensor, tokens: Tensor, probs: Tensor | None = None) -> tuple[Draft, Tensor]:
        """Append guesses below rows.

        Args:
            leaves: (n,) rows to grow from.
            tokens: (n, k) children of each leaf, most likely first.
            probs: (n, V) distribution from which the children were drawn; None when they are deterministic.

        Returns:
            The new draft and the rows of the children, (n * k,), leaf by leaf.
        """
        count, width = tokens.shape
        parent = leaves.repeat_interleave(width)
        slot = self.slot[parent]
        next_node = dict(zip(self.places.slot, self.places.node, strict=True))
        above = [leaf for leaf in leaves.tolist() for _ in range(width)]
        slots, node = [self.places.slot[leaf] for leaf in above], []
        for s in slots:
            next_node[s] += 1
            node.append(next_node[s])
        before = self.places
        tokens_known = self.lists.tokens if self.known is None else self.known.tokens
        known = RowLists(tokens_known, before.slot + slots, before.node + node, before.parent + above)
        rows = torch.arange(len(self.tokens), len(self.tokens) + count * width, device=self.device)
        flat = tokens.reshape(-1)
        distribution = self.probs
        given = probs if distribution is None else distribution
        if given is not None:  # a guess without a distribution is a point mass
            upper = _point_masses(self.tokens, given.shape[1]) if distribution is None else distribution
            lower = _point_masses(flat, given.shape[1]) if probs is None else probs.repeat_interleave(width, 0)
            distribution = torch.cat((upper, lower))
        grown = replace(
            self,
            tokens=torch.cat((self.tokens, flat)),
            slot=torch.cat((self.slot, slot)),
            node=torch.cat((self.node, torch.tensor(node, dtype=torch.int64, device=self.device))),
            parent=torch.cat((self.parent, parent)),
            probs=distribution,
            known=known,
        )
        return grown, rows

    def with_chains(self, chains: Mapping[int, Sequence[int]]) -> Draft:
        """Append a chain of deterministic guesses below the root of each slot, depth by depth, like ``grow``.

        Args:
            chains: tokens by slot, in the order of the new rows of a depth; a slot may have none.
        """
        assert self.probs is None, "guesses of a draft are drawn from distributions, or none is"
        tokens, slots, nodes, parents = (list(part) for part in self.lists)
        above = dict(zip(self.slots, self.last_rows, strict=True))
        for depth in range(max(map(len, chains.values()), default=0)):
            for slot, chain in chains.items():
                if len(chain) > depth:
                    tokens.append(chain[depth])
                    slots.append(slot)
                    nodes.append(nodes[above[slot]] + 1)
                    parents.append(above[slot])
                    above[slot] = len(tokens) - 1
        known = RowLists(tokens, slots, nodes, parents)
        rows = torch.tensor(known, dtype=torch.int64, device=self.device).unbind()
        return replace(self, tokens=rows[0], slot=rows[1], node=rows[2], parent=rows[3], known=known)

    def only(self, rows: Sequence[int]) -> Draft:
        """Return the draft with only these rows. With a row its ancestors must stay, and nodes keep their numbers.

        Args:
            rows: the rows that stay, in order.
        """
        place = {row: index for index, row in enumerate(rows)}
        parents = [place[p] if p >= 0 else -1 for p in (self.places.parent[row] for row in rows)]
        kept = torch.tensor(rows, device=self.device)
        return replace(
            self,
            tokens=self.tokens[kept],
            slot=self.slot[kept],
            node=self.node[kept],
            parent=torch.tensor(parents, device=self.device),
            probs=None if self.probs is None else self.probs[kept],
            hidden=None if self.hidden is None else self.hidden[kept],
            known=None,
        )

    def path(self, row: int) -> list[int]:
        """Return the rows from the slot's first committed token down to this row."""
        rows = []
        while row >= 0:
            rows.append(row)
            row = self.places.parent[row]
        return rows[::-1]


def _point_masses(tokens: Tensor, vocab: int) -> Tensor:
    return torch.nn.functional.one_hot(tokens, vocab).float()


@dataclass(frozen=True)
class TargetPass:
    """The result of a forward pass over the rows of a draft."""

    hidden: Tensor
    """(n, E) residuals before the final norm; whoever needs logits applies the head."""
    rows: Tensor
    """(n,) the draft's rows that came out. Like ``depth`` and ``work`` it is read by Python and lies on any device."""
    depth: Tensor | None = None
    """(n,) number of layers that each row passed; None when all of them."""
    work: Tensor | None = None
    """(n,) layer passes spent on each row, with those of draft rows and later fills counted at their slot's root; None
    where they are not counted."""
    came_back: Mapping[int, tuple[int, ...]] | None = None
    """By slot, for each layer behind which tokens are pruned: how many prompt tokens are computed there in this
    pass, as they came back; None where none can."""


class VerifiedStep(NamedTuple):
    """One step of a sequence: a draft below its root, and how much of it verification kept."""

    kept: int
    """Number of rows that stay: the root and the accepted guesses below it."""
    guessed: tuple[int, ...]
    """Depth below the root of every guess that was made."""


@dataclass(frozen=True)
class Verdict:
    """The result of verification, slot by slot in the order of ``Draft.slots``."""

    paths: tuple[tuple[int, ...], ...]
    """Rows that are kept, committed rows included, in path order."""
    next_tokens: tuple[int, ...]
    """The recovered or bonus token: it is decided, but not stored."""
    steps: tuple[tuple[VerifiedStep, ...], ...]
    """The steps that kept those rows: one where the session verified a draft, one or more of ``Decided``."""

    @property
    def accepted(self) -> tuple[int, ...]:
        """Return how many guesses were accepted, slot by slot."""
        return tuple(sum(step.kept - 1 for step in steps) for steps in self.steps)


@dataclass(frozen=True)
class Decided:
    """Steps of decoding made by one call of a backend, each drafted and verified before the next began.

    The text is that of plain decoding for the same reason as with a step of the session (``decode/verify.py``, greedy).
    In every step all rows of a draft passed all layers of the model (on a CPU with the bits of any other call). A guess
    was kept where it is the model's token after the row above it, up to the first that is not; the next step began with
    the model's token after the last kept row (``kernels/native/speculate.h``). That token is the argmax of the
    logits (``Distribution.is_greedy``) or of perturbed logits (``Context.drawings``); other sequences are not decided
    so. What a request stops at besides its end tokens is cut
    off afterwards, as in any block. The token after the last row is left to the session, which reads it from the
    residual there as after a pass of its own.
    """

    draft: Draft
    """The rows that stay, as committed tokens without guesses; their entries are stored in every layer."""
    passed: TargetPass
    """Their residuals after the last layer."""
    steps: tuple[tuple[VerifiedStep, ...], ...]
    """The steps of each slot, in the order of ``draft.slots``; together they kept the slot's rows."""
    draft_s: float = 0.0
    """Seconds of the call that were spent on drafting."""

    def verdict(self, next_tokens: Sequence[int]) -> Verdict:
        """Return the verdict on the rows, given the model's token after each slot's last one."""
        paths = tuple(tuple(self.draft.path(root)) for root in self.draft.last_rows)
        return Verdict(paths, tuple(next_tokens), self.steps)
