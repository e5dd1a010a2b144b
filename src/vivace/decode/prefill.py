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
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Draft, Drafter, SlotState, TargetPass
from vivace.core.step import Step
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

    def open(self, model: Decoder, cache: KVCache, *, chunk: int, spans: int = 1) -> PrefillState:
        """Return an empty state for one session.

        Args:
            model: the decoder.
            cache: holds the entries of that session's sequences.
            chunk: number of tokens of a piece; cached prefixes end at multiples of it, or with the prompt.
            spans: into how many pieces by layers the work on a chunk may be divided, so that decoding waits less; bits
                do not depend on it.
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

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Let each target go on with what is known of its source, whose prompt has been read."""
        ...


class FullPrefill:
    """Implements ``Prefill``: every token passes every layer, in chunks that begin at multiples of the chunk length."""

    name = "full"
    is_exact = True
    drafter: Drafter | None = None

    def open(self, model: Decoder, cache: KVCache, *, chunk: int, spans: int = 1) -> PrefillState:
        """Return the state of a session; it remembers chunks that have passed some of the layers."""
        return _Chunks(model, cache, chunk, layer_spans(0, model.config.num_layers, model.config.num_layers, spans))


FULL = FullPrefill()


def layer_spans(start: int, stop: int, num_layers: int, spans: int) -> list[tuple[int, int]]:
    """Divide layers start..stop-1 so that no part has more than ``1 / spans`` of all layers, rounded up."""
    size = -(-num_layers // spans)
    return [(first, min(first + size, stop)) for first in range(start, stop, size)]


class _Chunks(NoMemory):
    """Implements ``PrefillState``.

    Chunks begin at multiples of their length. The position of a chunk alone decides whether its rows attend together or
    one by one as while decoding. So a prompt gives the same bits whatever else is running.
    """

    def __init__(self, model: Decoder, cache: KVCache, chunk: int, spans: Sequence[tuple[int, int]]) -> None:
        self._model = model
        self._cache = cache
        self._chunk = chunk
        self._forward = ForwardPass()
        self._whole = [(0, model.config.num_layers)]
        self._kinds = {self._kind(by, span): (by == "chunks", *span) for span in (*spans, *self._whole) for by in _BY}
        self._spans = spans
        self._partly: dict[int, Tensor] = {}
        """By slot, residuals of a chunk that has passed some of the layers."""

    def plan(self, slot: int, prompt: Sequence[int], known: int) -> Sequence[PromptPiece]:
        """Return the chunks after the ``known`` tokens."""
        last = len(prompt) - 1
        starts = [known, *range(known - known % self._chunk + self._chunk, last, self._chunk)] if known < last else []
        pieces = [
            piece
            for first in starts
            for piece in self._pieces(first, min(first - first % self._chunk + self._chunk, last))
        ]
        assert all(piece.kind.startswith("rows") or piece.first % self._chunk == 0 for piece in pieces), (
            "chunks have their place"
        )
        return pieces

    def plan_again(self, first: int, stop: int) -> Sequence[PromptPiece]:
        """Return pieces whose rows attend one by one, as they did when decoding wrote their entries."""
        places = [(at, min(at + self._chunk, stop)) for at in range(first, stop, self._chunk)]
        return [PromptPiece(*place, self._kind("rows", span), 0) for place in places for span in self._divided(*place)]

    def _divided(self, first: int, stop: int) -> Sequence[tuple[int, int]]:
        """Return the spans of layers that a chunk passes one after the other: all at once where it has few rows."""
        return self._whole if (stop - first) * len(self._spans) <= self._chunk else self._spans

    def _kind(self, by: str, span: tuple[int, int]) -> str:
        """Return the kind of pieces that pass these layers and attend in one way."""
        return by if span in self._whole else f"{by} through layers {span[0]} to {span[1]}"

    def _pieces(self, first: int, stop: int) -> list[PromptPiece]:
        """Return the pieces of a chunk, span by span; it is read with the last one."""
        by = "rows" if stop <= self._model.backend.rows_up_to else "chunks"
        spans = self._divided(first, stop)
        return [
            PromptPiece(first, stop, self._kind(by, span), stop - first if span == spans[-1] else 0) for span in spans
        ]

    def read(self, pieces: Mapping[int, PromptPiece], prompts: Mapping[int, Sequence[int]]) -> PrefillPass:
        """Run one pass over a chunk of each slot, through a span of the layers."""
        tokens = {slot: prompts[slot][piece.first : piece.stop] for slot, piece in pieces.items()}
        draft = Draft.committed_only(tokens, is_prompt=True, device=self._cache.device)
        is_chunk, start, stop = self._kinds[next(iter(pieces.values())).kind]
        if start:
            hidden = torch.cat([self._partly[slot] for slot in tokens])
            draft = replace(draft, hidden=hidden, entry_layer=start)
        num_layers, counts = self._model.config.num_layers, {slot: len(chunk) for slot, chunk in tokens.items()}
        passes = {slot: (stop - start) * count for slot, count in counts.items()}
        with nullcontext() if is_chunk else threads_of(self._model):
            if stop < num_layers:
                step = Step.of(draft, self._cache, chunk=is_chunk)
                h = self._model.embed(draft.tokens, step) if draft.hidden is None else draft.hidden
                h = self._model.run(h, step, start, stop)
                self._partly |= dict(zip(tokens, h.split(list(counts.values())), strict=True))
                nothing = Draft.committed_only({}, is_prompt=True, device=self._cache.device)
                return PrefillPass(nothing, TargetPass(h[:0], torch.arange(0)), {}, passes)
            passed = self._forward.run(self._model, draft, self._cache, chunk=is_chunk)
        for slot in tokens:
            self._partly.pop(slot, None)
        return PrefillPass(draft if not start else replace(draft, hidden=None, entry_layer=0), passed, counts, passes)

    def release(self, slots: Sequence[int]) -> None:
        """Forget chunks of these slots that have passed some of the layers."""
        for slot in slots:
            self._partly.pop(slot, None)

    def saved(self) -> object:
        """Return chunks that have passed some of the layers; they are replaced, never changed."""
        return dict(self._partly)

    def restore(self, saved: object) -> None:
        """Go back to ``saved``."""
        assert isinstance(saved, dict)
        self._partly = dict(saved)


_BY = ("rows", "chunks")
