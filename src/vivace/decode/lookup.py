"""Prompt lookup: what followed these tokens last time is proposed again.

Source: Saxena 2023, "Prompt Lookup Decoding"; the same idea is Yang et al. 2023 (arXiv:2304.04487). The
longest n-gram at the end of the text that occurred before, n from ``max_ngram`` down to ``min_ngram``, is
looked up; its latest continuation is the draft. Where we differ: an index per slot holds the last two
places of every n-gram, so a look-up costs the same however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vivace.core.cache import KVCache
from vivace.core.seams import Context, Draft, TargetPass, Traversal, Verdict
from vivace.decode.forward import ForwardPass
from vivace.decode.plain import Forgetful, OwnsNoCache
from vivace.errors import ConfigError


@dataclass(frozen=True)
class LookupConfig:
    """How far back and how long."""

    num_draft_tokens: int = 5
    max_ngram: int = 3
    min_ngram: int = 2

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 1 or not 1 <= self.min_ngram <= self.max_ngram:
            raise ConfigError(
                f"lookup needs num_draft_tokens >= 1 and 1 <= min_ngram <= max_ngram, found "
                f"{self.num_draft_tokens}, {self.min_ngram}, {self.max_ngram}"
            )


class NgramIndex:
    """Where every n-gram of a text ended, latest occurrence first among those before the end."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], tuple[int, int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self.tokens.append(token)
            stop = len(self.tokens)
            for size in self.sizes:
                if stop >= size:
                    gram = tuple(self.tokens[stop - size :])
                    self._ends[gram] = (stop, self._ends.get(gram, (0, 0))[0])

    def continuation(self, count: int) -> list[int]:
        """Up to ``count`` tokens that followed the longest ending seen before; empty when none was."""
        for size in self.sizes:
            if len(self.tokens) > size:
                end = self._ends[tuple(self.tokens[-size:])][1]
                if end:
                    return self.tokens[end : end + count]
        return []


class PromptLookup(OwnsNoCache):
    """Fills ``Drafter``: drafts by looking the last tokens up in the text so far."""

    name = "lookup"

    def __init__(self, config: LookupConfig | None = None) -> None:
        self.config = LookupConfig() if config is None else config

    def open(self, cache: KVCache) -> LookupState:
        """State of a session that has read nothing yet."""
        return LookupState(self.config)


class LookupState(Forgetful):
    """Fills ``DraftState``: an index of each slot's text."""

    def __init__(self, config: LookupConfig) -> None:
        self.config = config
        self.traversal: Traversal = ForwardPass()
        self._index: dict[int, NgramIndex] = {}

    def propose(self, context: Context) -> Draft:
        """A chain per slot where the ending was seen before, nothing elsewhere."""
        return self.seed(context.committed(), context)[0]

    def seed(self, draft: Draft, context: Context) -> tuple[Draft, frozenset[int]]:
        """Chains below the roots of ``draft`` where the ending was seen before, and the slots that got one."""
        chains = {slot: self.guess(context, slot) for slot in context.slots}
        leaves = dict(zip(draft.slots, draft.last_rows, strict=True))
        for depth in range(max(map(len, chains.values()), default=0)):
            growing = [slot for slot in context.slots if len(chains[slot]) > depth]
            tokens = torch.tensor([[chains[slot][depth]] for slot in growing], device=draft.device)
            below = torch.tensor([leaves[slot] for slot in growing], device=draft.device)
            draft, rows = draft.grow(below, tokens)
            leaves.update(zip(growing, rows.tolist(), strict=True))
        return draft, frozenset(slot for slot, chain in chains.items() if chain)

    def guess(self, context: Context, slot: int) -> list[int]:
        """The tokens this slot's text suggests next, at most as many as it may still use."""
        tokens = context.tokens[slot]
        index = self._index.get(slot)
        if index is None or len(index.tokens) > len(tokens):
            index = self._index[slot] = NgramIndex(self.config.min_ngram, self.config.max_ngram)
        index.extend(tokens[len(index.tokens) :])
        room = context.max_nodes.get(slot, self.config.num_draft_tokens)
        return index.continuation(min(room, self.config.num_draft_tokens))

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """The text itself is all it needs."""

    def release(self, slots: Sequence[int]) -> None:
        """Forget these slots."""
        for slot in slots:
            self._index.pop(slot, None)
