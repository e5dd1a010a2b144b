"""The interfaces that a decoding method implements. The values that pass between them are in ``draft.py``.

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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from vivace.core.draft import Decided as Decided
from vivace.core.draft import Draft as Draft
from vivace.core.draft import RowLists as RowLists
from vivace.core.draft import TargetPass as TargetPass
from vivace.core.draft import Verdict as Verdict
from vivace.core.draft import VerifiedStep as VerifiedStep
from vivace.core.draws import Drawing
from vivace.core.text_memory import TextMemory

if TYPE_CHECKING:
    from vivace.core.cache import KVCache
    from vivace.core.model import Decoder
    from vivace.core.step import Step
    from vivace.kernels.low_bit import Weights


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
    drawings: Mapping[int, Drawing] = field(default_factory=dict)
    """By slot: how its tokens are drawn, where nothing but a temperature and top-p changes the logits."""
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
