"""Prompts that all ranks read together, each as one piece; rank 0 reads short ones alone, in chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Draft, TargetPass
from vivace.decode.plain import NoMemory
from vivace.decode.prefill import FULL, PrefillPass, PromptPiece

_WHOLE = "whole"
"""Kind of a piece that is a prompt."""


class WholePrompts(NoMemory, ABC):
    """Implements ``PrefillState``; a subclass says which prompts ranks share, and has one read."""

    def __init__(self, model: Decoder, cache: KVCache, chunk: int) -> None:
        """Read into a session's cache, alone in chunks of ``chunk`` tokens."""
        self.model = model
        self.cache = cache
        self.chunk = chunk
        self._alone = FULL.open(model, cache, chunk=chunk)

    @abstractmethod
    def is_shared(self, count: int) -> bool:
        """Return whether all ranks read a prompt of so many tokens, the last one left out."""

    @abstractmethod
    def read_together(self, slot: int, tokens: Sequence[int]) -> None:
        """Fill a slot with the entries of tokens, with the help of the other ranks."""

    def plan(self, slot: int, prompt: Sequence[int], known: int) -> Sequence[PromptPiece]:
        """Return the whole prompt as one piece, or chunks of it where this rank reads it alone."""
        last = len(prompt) - 1
        if known or not self.is_shared(last):
            return self._alone.plan(slot, prompt, known)
        return [PromptPiece(0, last, _WHOLE, last)]

    def plan_again(self, first: int, stop: int) -> Sequence[PromptPiece]:
        """Divide what a request had written; never asked for, as such requests keep their slots."""
        return self._alone.plan_again(first, stop)

    def read(self, pieces: Mapping[int, PromptPiece], prompts: Mapping[int, Sequence[int]]) -> PrefillPass:
        """Read whole prompts one after the other with all ranks, or chunks on this rank alone."""
        if next(iter(pieces.values())).kind != _WHOLE:
            return self._alone.read(pieces, prompts)
        model = self.model
        for slot, piece in pieces.items():
            self.read_together(slot, prompts[slot][: piece.stop])
        nobody = torch.empty(0, model.config.width, dtype=model.dtype, device=model.device)
        stored = {slot: piece.stop for slot, piece in pieces.items()}
        passes = {slot: model.config.num_layers * count for slot, count in stored.items()}
        draft = Draft.committed_only({}, is_prompt=True, device=model.device)
        return PrefillPass(draft, TargetPass(nobody, torch.arange(0)), stored, passes)
