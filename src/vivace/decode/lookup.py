"""Prompt lookup: when the last tokens have occurred before, what followed them there is the draft.

Source: Saxena 2023, "Prompt Lookup Decoding"; the same idea is Yang et al. 2023 (arXiv:2304.04487). The longest n-gram
at the end of the text that occurred before is looked up, n from ``max_ngram`` down to ``min_ngram``; what followed its
latest occurrence is the draft. Where we differ: an index per slot holds the last two places of every n-gram, so a
look-up costs the same however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Context, Decided, Draft, TargetPass, Traversal, Verdict
from vivace.decode.forward import ForwardPass
from vivace.decode.multi_step import deciding
from vivace.decode.plain import Forgetful, OwnsNoCache
from vivace.errors import ConfigError


@dataclass(frozen=True)
class LookupConfig:
    """Length of the drafts and of the n-grams that are looked up."""

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
    """The end positions of every n-gram of a text: of its latest occurrence and of the one before that."""

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
        """Return up to ``count`` tokens that followed the longest n-gram at the end of the text; empty
        when it is new.
        """
        for size in self.sizes:
            if len(self.tokens) > size:
                end = self._ends[tuple(self.tokens[-size:])][1]
                if end:
                    return self.tokens[end : end + count]
        return []


class PromptLookup(OwnsNoCache):
    """Implements ``Drafter``: drafts by looking up the last tokens in the text so far."""

    name = "lookup"

    def __init__(self, config: LookupConfig | None = None, model: Decoder | None = None) -> None:
        """Draft for any model; a step in which no text repeats itself is one call of ``model``, if it is given."""
        self.config = LookupConfig() if config is None else config
        self.model = model

    def open(self, cache: KVCache) -> LookupState:
        """Return the state of a session that has seen no text yet."""
        return LookupState(self.config, self.model)


class LookupState(Forgetful):
    """Implements ``DraftState``: an n-gram index of each slot's text."""

    def __init__(self, config: LookupConfig, model: Decoder | None = None) -> None:
        self.config = config
        self.model = model
        self.traversal: Traversal = ForwardPass()
        self._index: dict[int, NgramIndex] = {}

    def propose(self, context: Context) -> Draft | Decided:
        """Return the committed tokens, with a chain of guesses in each slot whose last tokens occurred before; where
        none did, the step is made here, as plain decoding makes it.
        """
        chains = self._chains(context)
        has_any = any(chains.values())
        found = None if has_any or self.model is None else deciding(self.model, context)
        if found is None:
            return context.committed().with_chains(chains) if has_any else context.committed()
        return found.chain.decide([found.root(slot, 0) for slot in found.pending], context.cache, context.ends)

    def seed(self, draft: Draft, context: Context) -> tuple[Draft, frozenset[int]]:
        """Add a chain below the roots of ``draft`` where the last tokens occurred before; also return the slots that
        got one.
        """
        chains = self._chains(context)
        known = frozenset(slot for slot, chain in chains.items() if chain)
        return draft.with_chains(chains) if known else draft, known

    def _chains(self, context: Context) -> dict[int, list[int]]:
        return {slot: self.guess(context, slot) for slot in context.slots}

    def guess(self, context: Context, slot: int) -> list[int]:
        """Return the tokens that followed this slot's last tokens before, at most as many as it may still use."""
        tokens = context.tokens[slot]
        index = self._index.get(slot)
        if index is None or len(index.tokens) > len(tokens):
            index = self._index[slot] = NgramIndex(self.config.min_ngram, self.config.max_ngram)
        index.extend(tokens[len(index.tokens) :])
        room = context.max_nodes.get(slot, self.config.num_draft_tokens)
        return index.continuation(min(room, self.config.num_draft_tokens))

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Do nothing: the index is read from the text itself."""

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """A text that begins like another is indexed by itself when it is drafted for."""

    def release(self, slots: Sequence[int]) -> None:
        """Forget these slots."""
        for slot in slots:
            self._index.pop(slot, None)
