"""How prompts are read: in which pieces one goes up the model, and which way.

A request names its ``Prefill`` as it names its drafter; requests with different ones may share a session. The session
decides when pieces go up (``decode/prompt_reader.py``): between decoding steps, several prompts in one pass, no more
rows than its budget, progress and cancellation after each. Everything else is the prefill's: what a piece is, which
rows pass which layers, what is stored and what it remembers meanwhile. It may run a pass of its own that leaves tokens
out on the way, fill the cache in any order and keep what it left out for later: its state hears of commits and releases
like the cache.

The last prompt token is never read here: it is the root of the first draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Draft, SlotState, TargetPass
from vivace.decode.forward import ForwardPass, threads_of
from vivace.decode.plain import NoMemory


@dataclass(frozen=True)
class PromptPiece:
    """A part of the work of reading one prompt: what one pass does of it."""

    first: int
    stop: int
    """Prompt tokens first..stop-1; as many rows go up at most."""
    kind: str
    """Pieces of one kind may share a pass."""
    num_read: int
    """Prompt tokens that are read to the end with it; 0 where they still have layers to go."""


@dataclass(frozen=True)
class PrefillPass:
    """What a pass over pieces of prompts brought."""

    draft: Draft
    """Prompt tokens that came out at the top, as given tokens, for the drafters; of some of the slots or of none."""
    passed: TargetPass
    """Their residuals there."""
    stored: Mapping[int, int]
    """By slot: how many more tokens of the prompt the cache holds now and may be committed; none where it lacks one."""


class Prefill(Protocol):
    """A way to read prompts: what it was told to do, the same for all sessions of an engine."""

    name: str
    """As users write it."""
    is_exact: bool
    """It stores what every token leaves in every layer, bit for bit. Only then prefixes that are known already are
    taken for its prompts, and its entries are kept for others."""

    def open(self, model: Decoder, cache: KVCache, *, chunk: int) -> PrefillState:
        """Start a session's state, empty.

        Args:
            model: the decoder.
            cache: holds the entries of that session's sequences.
            chunk: tokens of a piece; known prefixes end at multiples of it, or with the prompt.
        """
        ...


class PrefillState(SlotState, Protocol):
    """Reads the prompts of one session."""

    def plan(self, slot: int, prompt: Sequence[int], known: int) -> Sequence[PromptPiece]:
        """Divide a prompt that was given a slot.

        Args:
            slot: where its entries go.
            prompt: all its tokens; the last one is not to be read.
            known: tokens whose entries are stored already.

        Returns:
            The pieces in the order in which they have to go up.
        """
        ...

    def read(self, pieces: Mapping[int, PromptPiece], prompts: Mapping[int, Sequence[int]]) -> PrefillPass:
        """Take the next piece of each of these slots up the model, together; all are of one kind."""
        ...


class FullPrefill:
    """Fills ``Prefill``: every token through every layer, in chunks at fixed places."""

    name = "full"
    is_exact = True

    def open(self, model: Decoder, cache: KVCache, *, chunk: int) -> PrefillState:
        """State of a session; chunks go up whole, so there is nothing to remember."""
        return _Chunks(model, cache, chunk)


FULL = FullPrefill()


class _Chunks(NoMemory):
    """Fills ``PrefillState``.

    Chunks start at multiples of their length, and by their place alone go up as chunks, all rows attending together,
    or row by row as while decoding. So a prompt gives the same bits whatever else is running.
    """

    def __init__(self, model: Decoder, cache: KVCache, chunk: int) -> None:
        self._model = model
        self._cache = cache
        self._chunk = chunk
        self._climb = ForwardPass()

    def plan(self, slot: int, prompt: Sequence[int], known: int) -> Sequence[PromptPiece]:
        """Chunks behind what is known."""
        last = len(prompt) - 1
        assert known == last or known % self._chunk == 0, "a known prefix ends where a chunk does"
        return [self._piece(first, min(first + self._chunk, last)) for first in range(known, last, self._chunk)]

    def _piece(self, first: int, stop: int) -> PromptPiece:
        kind = "rows" if stop <= self._model.backend.rows_up_to else "chunks"
        return PromptPiece(first, stop, kind, stop - first)

    def read(self, pieces: Mapping[int, PromptPiece], prompts: Mapping[int, Sequence[int]]) -> PrefillPass:
        """One pass over a chunk of each slot."""
        tokens = {slot: prompts[slot][piece.first : piece.stop] for slot, piece in pieces.items()}
        draft = Draft.committed_only(tokens, is_prompt=True, device=self._cache.device)
        is_chunk = next(iter(pieces.values())).kind == "chunks"
        with nullcontext() if is_chunk else threads_of(self._model):
            passed = self._climb.run(self._model, draft, self._cache, chunk=is_chunk)
        return PrefillPass(draft, passed, {slot: len(chunk) for slot, chunk in tokens.items()})
