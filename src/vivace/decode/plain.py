"""No drafts: the decoder every other method is compared with; and what drafters remember that remember little."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from vivace.core.model import Decoder
from vivace.core.seams import Context, Draft, Root, TargetPass, Traversal, Verdict
from vivace.decode.climb import Climb


class Stateless:
    """A drafter's memory when it has none."""

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Nothing to keep."""

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Nothing to forget."""

    def fork(self, sources: Sequence[int], targets: Sequence[int], length: int | None = None) -> None:
        """Nothing to copy."""

    def release(self, slots: Sequence[int]) -> None:
        """Nothing to forget."""

    def settle(self, slots: Sequence[int]) -> None:
        """Always complete."""


class Forgetful(Stateless):
    """A drafter's memory of each slot that is dropped where a text changes: it drafts without until it sees more."""

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """What was kept may be gone."""
        self.release(slots)

    def fork(self, sources: Sequence[int], targets: Sequence[int], length: int | None = None) -> None:
        """Copies see for themselves."""
        self.release(targets)


class NoDrafts(Stateless):
    """Plain decoding: one row per slot and step."""

    def __init__(self, name: str = "plain", traversal: Traversal | None = None) -> None:
        """Give the way up another name if it is another than all rows together."""
        self.name = name
        self.traversal: Traversal = Climb() if traversal is None else traversal

    def propose(self, context: Context) -> Draft:
        """The decided tokens alone."""
        return context.given()

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Nothing to learn."""


BLOCK_S = 0.05
"""Tokens that come together take no longer than this to make, so that a text still grows evenly."""
MOST = 8
"""And there are never more of them: what lies behind a stop string was in vain."""
FORGET = 1.02
"""Growth of what is remembered of a pass with each further one."""


class RunsAhead(NoDrafts):
    """Plain decoding, greedily several tokens in one native call: at a small model the way to Python and back takes a
    quarter as long as a pass. The first token of a text comes alone.
    """

    def __init__(self, model: Decoder, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """For ``model``; ``clock`` tells how long its passes take."""
        super().__init__()
        self._model = model
        self._clock = clock
        self._pass_s: dict[int, float] = {}
        """A pass over so many sequences: the shortest seen, slowly forgotten."""

    def propose(self, context: Context) -> Draft:
        """The decided tokens, and those that the model decides behind them."""
        chain = self._model.chain
        if chain is None or self._model.row_count > 1 or not context.law.is_greedy(context.slots):
            return context.given()
        pending = {slot: context.tokens[slot][context.cache.lengths[slot] :] for slot in context.slots}
        if any(len(tokens) > 1 for tokens in pending.values()):
            return context.given()
        more = self._length(context) - 1
        roots = [
            Root(slot, tokens[0], min(more, context.max_nodes.get(slot, more))) for slot, tokens in pending.items()
        ]
        started = self._clock()
        draft = chain.decide(roots, context.cache, context.ends)
        pass_s = (self._clock() - started) / max(draft.given)
        self._pass_s[len(roots)] = min(pass_s, FORGET * self._pass_s.get(len(roots), pass_s))
        return draft

    def _length(self, context: Context) -> int:
        """How many tokens to decide at once."""
        pass_s = self._pass_s.get(len(context.slots))
        is_first = any(len(context.tokens[slot]) == context.cache.prompts[slot] for slot in context.slots)
        return 1 if pass_s is None or is_first else max(1, min(MOST, int(BLOCK_S / pass_s)))
