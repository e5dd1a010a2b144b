"""The interfaces that a decoding method implements, and the values that pass between them.

A method calls the model. It proposes tokens (``Drafter``), decides which rows pass which layers (``Traversal``),
remembers something for each sequence (``SlotState``), or builds the model from other weights (``Parts``). What can be
trained is in ``train/objective.py``, what ranks add up in ``summed.py``. Nothing else is pluggable.

Ownership: an engine owns drafters, which hold weights, a plan and timings, and serve any number of sessions that run
side by side. A session numbers its sequences by slots of its own cache, so everything remembered by slot belongs to the
session: it opens a ``DraftState`` from each drafter that its requests name, and drops it when it ends.

Words: a *draft* is a tree of nodes per slot. Its first nodes are *committed* tokens (a prompt chunk, or the tokens that
are not stored yet), the last of which is the *root*; the others are guesses. An *accepted* token is a guess that
verification kept; a *recovered* token replaces the first rejected guess; a *bonus* token follows when every guess of
the path was kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from vivace.core.text_memory import TextMemory

if TYPE_CHECKING:
    from vivace.core.cache import KVCache
    from vivace.core.model import Decoder
    from vivace.core.step import Step
    from vivace.kernels.low_bit import Weights


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
    """Steps of greedy decoding made by one native call, each drafted and verified before the next began.

    The text is that of plain decoding for the same reason as with a step of the session (``decode/verify.py``, greedy).
    In every step all rows of a draft passed all layers of the model, with the bits they have in any other call. A guess
    was kept where it is the model's argmax after the row above it, up to the first that is not; the next step began
    with the model's argmax after the last kept row (``kernels/native/speculate.h``). So only sequences whose next token
    is that argmax may be decided (``Distribution.is_greedy``). What a request stops at besides its end tokens is cut
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
        """Return the verdict on the rows, given the model's argmax after each slot's last one."""
        paths = tuple(tuple(self.draft.path(root)) for root in self.draft.last_rows)
        return Verdict(paths, tuple(next_tokens), self.steps)


class Distribution(Protocol):
    """Computes the distribution of a slot's next token after a hypothetical prefix."""

    def __call__(self, logits: Tensor, draft: Draft, rows: Tensor) -> Tensor:
        """Return probabilities (n, V) float32 after processors, for draft ``rows`` (n,) with ``logits`` (n, V).

        Greedy slots get a one-hot row.
        """
        ...

    def is_greedy(self, slots: Sequence[int]) -> bool:
        """Return whether all of these slots take the argmax without a processor, so that no distribution is needed."""
        ...


@dataclass(frozen=True)
class Context:
    """What a drafter may read when it proposes."""

    slots: tuple[int, ...]
    tokens: Mapping[int, Sequence[int]]
    """By slot: all tokens decided so far. The last ``len(tokens) - cache.lengths`` of them are not stored yet."""
    cache: KVCache
    distribution: Distribution
    max_nodes: Mapping[int, int] = field(default_factory=dict)
    """By slot: number of guesses that it can still use before its limit."""
    generators: Mapping[int, torch.Generator] = field(default_factory=dict)
    ends: tuple[int, ...] = ()
    """Tokens after which nothing is decoded; there may be further reasons to stop."""
    room: Mapping[int, int] = field(default_factory=dict)
    """By slot: number of tokens, beside the pending one, that one proposal may decide; 0 where it is missing."""
    steps_per_call: int | None = None
    """Number of steps that a proposal may consist of: 0 allows drafts only, None as many as the drafter's timings
    allow."""

    def committed(self) -> Draft:
        """Return the decided tokens that are not stored yet: a draft without guesses, i.e. plain decoding."""
        fresh = {s: self.tokens[s][self.cache.lengths[s] :] for s in self.slots}
        return Draft.committed_only(fresh, device=self.cache.device)


class SlotState(Protocol):
    """Remembers something about the sequences of one session; the session makes the same calls to every such state."""

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep these draft nodes, in path order, and forget the others."""
        ...

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Forget positions >= length (stop string, cancel)."""
        ...

    def release(self, slots: Sequence[int]) -> None:
        """Forget these sequences."""
        ...

    def saved(self) -> object:
        """Return the present state for ``restore``; later calls must not change it."""
        ...

    def restore(self, saved: object) -> None:
        """Set the state back to ``saved``: a pass failed, and is run again or given up."""
        ...


class Stateful(Protocol):
    """A part of the model that remembers sequences, such as windows of neurons; each session opens a
    state of its own.
    """

    def open(self, cache: KVCache) -> SlotState:
        """Return the state of the session whose sequences are in ``cache``."""
        ...


class Prefix(Protocol):
    """Entries of prompts that need not be computed again, and the residuals that came out at the top beside them.

    The session shows those to the drafter, so it knows of a prompt what it would know had the prompt been read: the
    guesses, and with them a sampled text, are the same with and without cached entries.
    """

    @property
    def keeps_answers(self) -> bool:
        """Return whether it wants what decoding writes, too: bits are then those of a prompt, however it is divided."""
        ...

    def attach(self, tokens: Sequence[int], slot: int, cache: KVCache) -> Sequence[Tensor]:
        """Put what is known of these prompt tokens into an empty slot.

        The bits must be those that prefill would write: whole chunks or all of ``tokens``; with ``keeps_answers``, any.

        Returns:
            Residuals at the top of the tokens that are stored now, in order, (n, E) for each chunk.
        """
        ...

    def keep(self, tokens: Sequence[int], slot: int, cache: KVCache, hidden: Tensor) -> None:
        """Remember the entries of a text that is wholly stored, and its residuals at the top, (tokens, E)."""
        ...


class Memory(Protocol):
    """Where the keys and values of a call are stored and read."""

    def put(self, layer: int, step: Step, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of the writing rows at ``step.entry``."""
        ...

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, of a dense call (B, K, T/B, D) each; a cache has them in blocks."""
        ...


class Span(Protocol):
    """Runs neighbouring layers in one call, with the same bits as one by one."""

    is_native: bool
    """Whether native code with threads of its own runs the layers."""

    def covers(self, step: Step) -> bool:
        """Return whether it can run this call."""
        ...

    def run(self, h: Tensor, step: Step, start: int, stop: int) -> Tensor:
        """Run rows (T, E) through layers start..stop-1."""
        ...

    def quantized(self, start: int, stop: int, weights: Weights) -> Span:
        """Return a span with quantized copies of the matrices of layers start..stop-1, for drafts."""
        ...


class Traversal(Protocol):
    """Decides which rows of a draft pass which layers."""

    def run(self, model: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> TargetPass:
        """Run the rows of a draft; ``chunk`` marks prompt chunks, whose rows attend together."""
        ...


class Drafter(Protocol):
    """A decoding method: its weights, its plan, and what was measured while it drafted.

    One object serves all sessions of an engine, also those that run alternately. It remembers no sequence. A drafter
    whose states would remember none either may be its own state (``decode/plain.py``).
    """

    name: str
    """The method, as users write it."""

    @property
    def leaves_all_entries(self) -> bool:
        """Return whether every decoded token has the entries that reading it would write, so that it can be read."""
        ...

    def text_bytes(self, entries: int) -> int:
        """Return the most memory that a text of so many entries takes in the drafter's own caches; 0 if it has none."""
        ...

    def open(self, cache: KVCache) -> DraftState:
        """Return an empty state for one session.

        Args:
            cache: holds the target's entries of that session's sequences; the state uses the same slots.

        Raises:
            CapacityError: the drafter's own cache does not fit into memory.
        """
        ...


class DraftState(SlotState, TextMemory, Protocol):
    """Proposes tokens for the sequences of one session, and remembers by slot what it needs for that."""

    traversal: Traversal
    """Decides which layers the rows of its drafts pass."""

    @property
    def reason(self) -> str | None:
        """Return why the last draft was made as it was, for users; None where a method has nothing to choose."""
        ...

    def propose(self, context: Context) -> Draft | Decided:
        """Return the committed tokens of each slot with guesses below them, or steps that are verified already."""
        ...

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Read the result of a target pass; it is called after prompt chunks too, with no verdict."""
        ...
