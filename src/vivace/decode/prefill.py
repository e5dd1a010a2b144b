"""How prompts are read: into which pieces a prompt is divided, and how each piece passes the model.

A request names its ``Prefill`` as it names its drafter; requests with different ones may share a session. The session
decides when pieces run (``decode/prompt_reader.py``): between decoding steps, several prompts in one pass within its
row budget, with progress and cancellation after each. Everything else is up to the prefill: what a piece is, which rows
pass which layers, what is stored, and what it remembers meanwhile. It may run passes that leave tokens out, store
entries in any order, and return later to what it left out. Its state is told of commits and releases as the cache is.

The last prompt token is never read here, because it is the root of the first draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Draft, Drafter, SlotState, TargetPass
from vivace.decode.forward import ForwardPass, threads_of
from vivace.decode.plain import NoMemory


@dataclass(frozen=True)
class PromptPiece:
    """Part of the work of reading one prompt: what one pass does."""

    first: int
    stop: int
    """The piece is prompt tokens first..stop-1; the pass has at most that many rows for it."""
    kind: str
    """Only pieces of one kind may share a pass."""
    num_read: int
    """Number of prompt tokens that have been read completely after this piece; 0 where they still have
    layers to pass."""


@dataclass(frozen=True)
class PrefillPass:
    """The result of one pass over pieces of prompts."""

    draft: Draft
    """Prompt tokens that passed the last layer, as committed tokens, for the drafters; of some of the
    slots or of none."""
    passed: TargetPass
    """Residuals of those tokens after the last layer."""
    stored: Mapping[int, int]
    """By slot: number of further prompt tokens that may be committed: the cache holds of them what it ever will."""
    passes: Mapping[int, int] = field(default_factory=dict)
    """By slot: layers that its rows passed, summed over the rows."""
    kept: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """By slot whose prompt is read now: layers behind which tokens were pruned, and how many went on."""


class Prefill(Protocol):
    """A way to read prompts, with its settings; one object serves all sessions of an engine."""

    name: str
    """The name that users write."""
    is_exact: bool
    """Whether it stores, bit for bit, the keys and values that every token has in every layer. Only then are entries
    taken from a prefix cache for its prompts and given to one."""

    drafter: Drafter | None
    """The only one that can decode after such a prompt; None where any may."""

    def open(self, model: Decoder, cache: KVCache, *, chunk: int) -> PrefillState:
        """Return an empty state for one session.

        Args:
            model: the decoder.
            cache: holds the entries of that session's sequences.
            chunk: number of tokens of a piece; cached prefixes end at multiples of it, or with the prompt.
        """
        ...


class PrefillState(SlotState, Protocol):
    """Reads the prompts of one session."""

    def plan(self, slot: int, prompt: Sequence[int], known: int) -> Sequence[PromptPiece]:
        """Divide a prompt that was given a slot into pieces.

        Args:
            slot: where its entries go.
            prompt: all its tokens; the last one is not to be read.
            known: number of leading tokens whose entries are stored already.

        Returns:
            The pieces in the order in which they have to run.
        """
        ...

    def plan_again(self, first: int, stop: int) -> Sequence[PromptPiece]:
        """Divide what a request had written behind its prompt when it lost its slot: tokens first..stop-1.

        Asked only of a ``Prefill`` that is exact. The entries have to be those that decoding had written.
        """
        ...

    def read(self, pieces: Mapping[int, PromptPiece], prompts: Mapping[int, Sequence[int]]) -> PrefillPass:
        """Run the next piece of each of these slots in one pass; all pieces are of one kind."""
        ...


class FullPrefill:
    """Implements ``Prefill``: every token passes every layer, in chunks that begin at multiples of the chunk length."""

    name = "full"
    is_exact = True
    drafter: Drafter | None = None

    def open(self, model: Decoder, cache: KVCache, *, chunk: int) -> PrefillState:
        """Return the state of a session; since chunks are read completely, it remembers nothing."""
        return _Chunks(model, cache, chunk)


FULL = FullPrefill()


class _Chunks(NoMemory):
    """Implements ``PrefillState``.

    Chunks begin at multiples of their length. The position of a chunk alone decides whether its rows attend together or
    one by one as while decoding. So a prompt gives the same bits whatever else is running.
    """

    def __init__(self, model: Decoder, cache: KVCache, chunk: int) -> None:
        self._model = model
        self._cache = cache
        self._chunk = chunk
        self._forward = ForwardPass()

    def plan(self, slot: int, prompt: Sequence[int], known: int) -> Sequence[PromptPiece]:
        """Return the chunks after the ``known`` tokens."""
        last = len(prompt) - 1
        starts = [known, *range(known - known % self._chunk + self._chunk, last, self._chunk)] if known < last else []
        pieces = [self._piece(first, min(first - first % self._chunk + self._chunk, last)) for first in starts]
        assert all(piece.kind == "rows" or piece.first % self._chunk == 0 for piece in pieces), (
            "chunks have their place"
        )
        return pieces

    def plan_again(self, first: int, stop: int) -> Sequence[PromptPiece]:
        """Rows, which they were when they were written."""
        return [PromptPiece(at, min(at + self._chunk, stop), "rows", 0) for at in range(first, stop, self._chunk)]

    def _piece(self, first: int, stop: int) -> PromptPiece:
        kind = "rows" if stop <= self._model.backend.rows_up_to else "chunks"
        return PromptPiece(first, stop, kind, stop - first)

    def read(self, pieces: Mapping[int, PromptPiece], prompts: Mapping[int, Sequence[int]]) -> PrefillPass:
        """Run one pass over a chunk of each slot."""
        tokens = {slot: prompts[slot][piece.first : piece.stop] for slot, piece in pieces.items()}
        draft = Draft.committed_only(tokens, is_prompt=True, device=self._cache.device)
        is_chunk = next(iter(pieces.values())).kind == "chunks"
        with nullcontext() if is_chunk else threads_of(self._model):
            passed = self._forward.run(self._model, draft, self._cache, chunk=is_chunk)
        counts = {slot: len(chunk) for slot, chunk in tokens.items()}
        num_layers = self._model.config.num_layers
        return PrefillPass(draft, passed, counts, {slot: num_layers * count for slot, count in counts.items()})
