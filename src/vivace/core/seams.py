"""The whole extension surface on one page: what a technique fills in, and the values that pass between.

A technique is a caller of the model. It proposes tokens (``Drafter``), decides how rows go up
(``Traversal``), remembers something per sequence (``SlotState``) or builds the weights another way
(``Parts``). What can be trained is ``train/objective.py``. Nothing else is pluggable.

Who owns what: an engine owns drafters, which hold weights, a plan and timings, and serve any number of sessions that
run side by side. A session numbers its sequences by slots of its own cache, so whatever is remembered by slot belongs
to it: it opens a ``DraftState`` from each drafter that its requests name, and drops it with itself.

Words: a *draft* is a tree of nodes per slot. Its first ``given`` nodes are decided tokens (prompt chunk,
the pending token; the last of them is the *root*), the others are guesses. An *accepted* token is a guess
that verification kept; a *recovered* token replaces the first rejected guess; a *bonus* token follows when
every guess of the path was kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vivace.core.cache import KVCache
    from vivace.core.model import Decoder
    from vivace.core.step import Step
    from vivace.kernels.low_bit import Weights


class RowLists(NamedTuple):
    """``Draft``'s rows as plain numbers."""

    tokens: list[int]
    slot: list[int]
    node: list[int]
    parent: list[int]


@dataclass(frozen=True)
class Draft:
    """Tokens to run, as rows that are only ever appended."""

    slots: tuple[int, ...]
    committed: tuple[int, ...]
    """Decided tokens at the front of each slot's nodes; the last is the root."""
    tokens: Tensor
    """(T,)"""
    slot: Tensor
    """(T,)"""
    node: Tensor
    """(T,) number of the row within its slot, 0 for the first given token."""
    parent: Tensor
    """(T,) row of the parent, -1 for a slot's first row."""
    probs: Tensor | None = None
    """(T, V) law each guess was sampled from, processors applied; None when guesses are deterministic."""
    hidden: Tensor | None = None
    """(T, E) residuals entering ``entry_layer``: the layers below are done and their entries stored."""
    entry_layer: int = 0
    is_prompt: bool = False
    """The rows are of prompts: nothing is decided behind them."""

    @staticmethod
    def committed_only(
        tokens: Mapping[int, Sequence[int]], *, is_prompt: bool = False, device: torch.device | None = None
    ) -> Draft:
        """Decided tokens per slot and no guesses: plain decoding, or a prompt chunk; rows are made on ``device``."""
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
        )

    @property
    def device(self) -> torch.device:
        """Where its rows are: the model's device."""
        return self.tokens.device

    @cached_property
    def lists(self) -> RowLists:
        """The rows' numbers for Python, read once."""
        return RowLists(self.tokens.tolist(), self.slot.tolist(), self.node.tolist(), self.parent.tolist())

    @cached_property
    def is_chain(self) -> bool:
        """Whether every slot's nodes follow one another without a branch."""
        last: dict[int, int] = {}
        for row, (slot, parent) in enumerate(zip(self.lists.slot, self.lists.parent, strict=True)):
            if last.get(slot, -1) != parent:
                return False
            last[slot] = row
        return True

    @cached_property
    def depths(self) -> list[int]:
        """Edges between each row and its slot's root, 0 for given rows."""
        committed = dict(zip(self.slots, self.committed, strict=True))
        depths: list[int] = []
        for slot, node, parent in zip(self.lists.slot, self.lists.node, self.lists.parent, strict=True):
            depths.append(0 if node < committed[slot] else depths[parent] + 1)
        return depths

    @cached_property
    def last_rows(self) -> list[int]:
        """Row of each slot's root, in the order of ``slots``."""
        last = {slot: committed - 1 for slot, committed in zip(self.slots, self.committed, strict=True)}
        nodes = zip(self.lists.slot, self.lists.node, strict=True)
        row_of = {slot: row for row, (slot, node) in enumerate(nodes) if node == last[slot]}
        return [row_of[slot] for slot in self.slots]

    def last_committed(self) -> Tensor:
        """``last_rows`` as indices, (number of slots,)."""
        return torch.tensor(self.last_rows, device=self.device)

    def grow(self, leaves: Tensor, tokens: Tensor, probs: Tensor | None = None) -> tuple[Draft, Tensor]:
        """Append guesses below rows.

        Args:
            leaves: (n,) rows to grow from.
            tokens: (n, k) children of each leaf, most likely first.
            probs: (n, V) law the children were sampled from; None when they are deterministic.

        Returns:
            The new draft and the rows of the children, (n * k,), leaf by leaf.
        """
        count, width = tokens.shape
        parent = leaves.repeat_interleave(width)
        slot = self.slot[parent]
        next_node = dict(zip(self.lists.slot, self.lists.node, strict=True))
        node = []
        for s in slot.tolist():
            next_node[s] += 1
            node.append(next_node[s])
        rows = torch.arange(len(self.tokens), len(self.tokens) + count * width, device=self.device)
        flat = tokens.reshape(-1)
        distribution = self.probs
        known = probs if distribution is None else distribution
        if known is not None:  # a guess without a law is a point mass
            above = _point_masses(self.tokens, known.shape[1]) if distribution is None else distribution
            below = _point_masses(flat, known.shape[1]) if probs is None else probs.repeat_interleave(width, 0)
            distribution = torch.cat((above, below))
        grown = replace(
            self,
            tokens=torch.cat((self.tokens, flat)),
            slot=torch.cat((self.slot, slot)),
            node=torch.cat((self.node, torch.tensor(node, dtype=torch.int64, device=self.device))),
            parent=torch.cat((self.parent, parent)),
            probs=distribution,
        )
        return grown, rows

    def only(self, rows: Sequence[int]) -> Draft:
        """The draft without its other rows; with a row stays what is above it, and nodes keep their numbers.

        Args:
            rows: which stay, in order.
        """
        place = {row: index for index, row in enumerate(rows)}
        parents = [place[p] if p >= 0 else -1 for p in (self.lists.parent[row] for row in rows)]
        kept = torch.tensor(rows, device=self.device)
        return replace(
            self,
            tokens=self.tokens[kept],
            slot=self.slot[kept],
            node=self.node[kept],
            parent=torch.tensor(parents, device=self.device),
            probs=None if self.probs is None else self.probs[kept],
            hidden=None if self.hidden is None else self.hidden[kept],
        )

    def path(self, row: int) -> list[int]:
        """Rows from the slot's first given token down to this one."""
        rows = []
        while row >= 0:
            rows.append(row)
            row = self.lists.parent[row]
        return rows[::-1]


def _point_masses(tokens: Tensor, vocab: int) -> Tensor:
    return torch.nn.functional.one_hot(tokens, vocab).float()


@dataclass(frozen=True)
class TargetPass:
    """What came out at the top."""

    hidden: Tensor
    """(n, E) before the final norm; logits are taken by whoever needs them."""
    rows: Tensor
    """(n,) draft rows that reached the top; like ``depth`` and ``work`` it is for Python to read, on any device."""
    depth: Tensor | None = None
    """(n,) layers each row went through, None when all of them."""
    work: Tensor | None = None
    """(n,) layer passes spent on each row, companions and late fills of its slot under the root; None when not told."""


class VerifiedStep(NamedTuple):
    """One step of a sequence: a draft below its root, and how much of it verification kept."""

    kept: int
    """Rows that stay: the root and the accepted guesses below it."""
    guessed: tuple[int, ...]
    """Depth below the root of every guess that was made."""


@dataclass(frozen=True)
class Verdict:
    """What verification decided, slot by slot in the order of ``Draft.slots``."""

    paths: tuple[tuple[int, ...], ...]
    """Rows kept, given rows included, in path order."""
    next_tokens: tuple[int, ...]
    """The recovered or bonus token: decided, not stored."""
    steps: tuple[tuple[VerifiedStep, ...], ...]
    """The steps that kept those rows: one where the session verified a draft, one or more of ``Decided``."""

    @property
    def accepted(self) -> tuple[int, ...]:
        """How many guesses were kept, slot by slot."""
        return tuple(sum(step.kept - 1 for step in steps) for steps in self.steps)


@dataclass(frozen=True)
class Decided:
    """Steps of greedy decoding that one native call has made, each drafted and verified before the next began.

    The text is plain decoding's for the reason that a step of the session's own is (``decode/verify.py``, greedy). In
    every step all rows of a draft went through all layers of the model, with the bits they have in any other call; a
    guess was kept where it is the model's argmax behind the row above it, and nothing below the first other one; the
    next step began with the model's argmax behind the last kept row (``kernels/native/speculate.h``). So only sequences
    whose next token is that argmax may be decided (``Distribution.is_greedy``), and what a request stops at besides its
    end tokens is cut off afterwards, as in any block. The token behind the last row is left to the session, which reads
    it from the residual there as after a pass of its own.
    """

    draft: Draft
    """The rows that stay, as given tokens without guesses; their entries are stored in every layer."""
    passed: TargetPass
    """Their residuals at the top, as the passes left them."""
    steps: tuple[tuple[VerifiedStep, ...], ...]
    """The steps of each slot, in the order of ``draft.slots``; what they kept is the slot's rows."""
    draft_s: float = 0.0
    """Seconds of the call that went into drafting."""

    def verdict(self, next_tokens: Sequence[int]) -> Verdict:
        """The verdict on the rows, given the model's argmax behind each slot's last one."""
        paths = tuple(tuple(self.draft.path(root)) for root in self.draft.last_rows)
        return Verdict(paths, tuple(next_tokens), self.steps)


class Distribution(Protocol):
    """The law a slot's next token is drawn from, on a hypothetical prefix."""

    def __call__(self, logits: Tensor, draft: Draft, rows: Tensor) -> Tensor:
        """Probabilities (n, V) float32 after processors, for draft ``rows`` (n,) with ``logits`` (n, V).

        Greedy slots get a one-hot row.
        """
        ...

    def is_greedy(self, slots: Sequence[int]) -> bool:
        """Whether every one of these slots takes the argmax with no processor: laws need not be built."""
        ...


@dataclass(frozen=True)
class Context:
    """What a drafter may look at."""

    slots: tuple[int, ...]
    tokens: Mapping[int, Sequence[int]]
    """Everything decided so far per slot; the last ``tokens - cache.lengths`` are not stored yet."""
    cache: KVCache
    distribution: Distribution
    max_nodes: Mapping[int, int] = field(default_factory=dict)
    """Guesses a slot may still use before its limit; drafting past it is waste."""
    generators: Mapping[int, torch.Generator] = field(default_factory=dict)
    ends: tuple[int, ...] = ()
    """Tokens behind which nothing is decoded; there may be further reasons to stop."""
    room: Mapping[int, int] = field(default_factory=dict)
    """Tokens of a slot that may be decided in one proposal beside the pending one, none where it is missing."""
    steps_per_call: int | None = None
    """Steps that a proposal may consist of: 0 allows drafts alone, None as many as the drafter's clock allows."""

    def committed(self) -> Draft:
        """The decided but unstored tokens: the empty draft, i.e. plain decoding."""
        fresh = {s: self.tokens[s][self.cache.lengths[s] :] for s in self.slots}
        return Draft.committed_only(fresh, device=self.cache.device)


class SlotState(Protocol):
    """Whatever remembers the sequences of one session; the session tells every one of them the same things."""

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep these draft nodes, in path order; forget the rest."""
        ...

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Forget positions >= length (stop string, cancel)."""
        ...

    def release(self, slots: Sequence[int]) -> None:
        """Forget these sequences."""
        ...

    def saved(self) -> object:
        """What is remembered now, for ``restore``; what comes after must not change it."""
        ...

    def restore(self, saved: object) -> None:
        """Remember that again and nothing else: a pass failed on the way, and is made again or given up."""
        ...


class Stateful(Protocol):
    """A part of the model that remembers sequences (windows of neurons): each session opens a state of its own."""

    def open(self, cache: KVCache) -> SlotState:
        """Start the state of the session that keeps its sequences in ``cache``."""
        ...


class Prefix(Protocol):
    """Entries of prompts that need not be computed again, and the residuals that came out at the top beside them.

    The session shows those to the drafter, so it knows of a prompt what it would know had the prompt been read: the
    guesses, and with them a sampled text, are the same with and without cached entries.
    """

    def attach(self, tokens: Sequence[int], slot: int, cache: KVCache) -> Sequence[Tensor]:
        """Put what is known of these prompt tokens into an empty slot.

        The bits must be those that prefill would write: whole chunks, or all of ``tokens``.

        Returns:
            Residuals at the top of the tokens that are stored now, in order, (n, E) for each chunk.
        """
        ...

    def keep(self, tokens: Sequence[int], slot: int, cache: KVCache, hidden: Tensor) -> None:
        """Remember the entries of a prompt that is wholly stored, and its residuals at the top, (tokens, E)."""
        ...


class Memory(Protocol):
    """Where a call's keys and values go and come from."""

    def put(self, layer: int, step: Step, keys: Tensor, values: Tensor) -> None:
        """Store the writing rows at ``step.entry``."""
        ...

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, (slots, K, S, D) each."""
        ...


class Span(Protocol):
    """Executes neighbouring layers at once, bit for bit what they give one by one."""

    def covers(self, step: Step) -> bool:
        """Whether it can execute this call."""
        ...

    def run(self, h: Tensor, step: Step, start: int, stop: int) -> Tensor:
        """Rows (T, E) through layers start..stop-1."""
        ...

    def quantized(self, start: int, stop: int, weights: Weights) -> Span:
        """The same with copies in few bits of the matrices of layers start..stop-1, for drafts."""
        ...


class Expert(Protocol):
    """The feed-forward of one expert."""

    def __call__(self, x: Tensor, step: Step, add: Tensor | None = None, /) -> Tensor:
        """(T, E) -> (T, E)."""
        ...


class Experts(Protocol):
    """Gives a layer its experts: from memory that holds them all, or from an expert cache."""

    def fetch(self, chosen: Sequence[int], *, is_prompt: bool) -> Iterator[tuple[int, Expert]]:
        """Yield each chosen expert once, as it becomes ready; one is good until the next is asked for.

        Args:
            chosen: numbers of the experts that some of the rows chose.
            is_prompt: the rows belong to prompts, which choose nearly all experts, so the choice says little about
                the rows to come.
        """
        ...

    def prefetch(self, likely: Sequence[int]) -> None:
        """Read these experts, the likeliest first, before the layer runs; this replaces the last prediction.

        Predicting is optional and never changes what is computed.
        """
        ...

    def predict_reuse(self, passes: Sequence[float]) -> None:
        """Record in how many passes after the next one each expert is expected to be used; eviction may go by it."""
        ...


class Traversal(Protocol):
    """How draft rows go up the model."""

    def run(self, model: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> TargetPass:
        """Take the rows up; ``chunk`` marks prompt chunks."""
        ...


class Drafter(Protocol):
    """A way to draft: its weights, its plan and what was measured while it drafted.

    One object serves all sessions of an engine, also those that run by turns. It remembers no sequence; a drafter
    whose states would remember none either may be its own state (``decode/plain.py``).
    """

    name: str
    """The method, as users write it."""

    def text_bytes(self, entries: int) -> int:
        """Memory that a text of so many entries takes at most in caches of the drafter's own; 0 where it has none."""
        ...

    def open(self, cache: KVCache) -> DraftState:
        """Start a session's state, empty.

        Args:
            cache: holds the target's entries of that session's sequences; its slots are those the state hears of.

        Raises:
            CapacityError: a drafter's own cache beside it does not fit into memory.
        """
        ...


class DraftState(SlotState, Protocol):
    """Proposes tokens for the sequences of one session, and remembers by slot what it needs for that."""

    traversal: Traversal
    """How the rows of its drafts go up."""

    @property
    def reason(self) -> str | None:
        """Why the last draft was made as it was, for users; None where a method leaves nothing to choose."""
        ...

    def propose(self, context: Context) -> Draft | Decided:
        """The decided tokens of each slot and guesses below them, or steps that are verified already."""
        ...

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """What the target pass showed; also after prompt chunks, with no verdict."""
        ...
