"""No drafts: the decoder every other method is compared with; and what drafters remember that remember little."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Self

from vivace.core.cache import KVCache
from vivace.core.draft_rows import Chain, ChainPlan, Root
from vivace.core.model import Decoder
from vivace.core.seams import Context, Draft, TargetPass, Traversal, Verdict
from vivace.decode.forward import ForwardPass
from vivace.kernels.low_bit import Weights


class NoMemory:
    """The calls of ``SlotState`` for a draft state that keeps nothing between them."""

    reason: str | None = None
    """There is nothing to choose."""

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

    def saved(self) -> object:
        """Nothing."""
        return None

    def restore(self, saved: object) -> None:
        """Nothing to go back to."""


class Stateless(NoMemory):
    """A drafter that remembers no sequence: it is its own state in every session."""

    def open(self, cache: KVCache) -> Self:
        """Itself, since there is nothing to keep apart."""
        return self


class Forgetful(NoMemory):
    """Draft state that drops what it knows of a slot where its text changes, and drafts without until it sees more."""

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """What was kept may be gone."""
        self.release(slots)

    def fork(self, sources: Sequence[int], targets: Sequence[int], length: int | None = None) -> None:
        """Copies see for themselves."""
        self.release(targets)

    def saved(self) -> object:
        """What its dictionaries hold by slot; their values are replaced as texts go on, or are lists that grow."""
        return {
            name: {slot: list(known) if isinstance(known, list) else known for slot, known in by_slot.items()}
            for name, by_slot in vars(self).items()
            if isinstance(by_slot, dict)
        }

    def restore(self, saved: object) -> None:
        """Know that again."""
        assert isinstance(saved, dict)
        vars(self).update(saved)


class NoDrafts(Stateless):
    """Plain decoding: one row per slot and step."""

    def __init__(self, name: str = "plain", traversal: Traversal | None = None) -> None:
        """Give the way up another name if it is another than all rows together."""
        self.name = name
        self.traversal: Traversal = ForwardPass() if traversal is None else traversal

    def propose(self, context: Context) -> Draft:
        """The decided tokens alone."""
        return context.committed()

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Nothing to learn."""


BLOCK_S = 0.05
"""Tokens that come together take no longer than this to make, so that a text still grows evenly."""
MOST = 8
"""And there are never more of them: what lies behind a stop string was in vain."""
FORGET = 1.02
"""Growth of what is remembered of a pass with each further one."""


class StepBudget:
    """How much may be decided in one native call: one pass or step where a text begins, then what fits ``BLOCK_S``.

    At a small model the way to Python and back takes a quarter as long as a pass.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock`` tells how long passes take."""
        self._clock = clock
        self._pass_s: dict[int, float] = {}
        """Of one over so many sequences: the shortest seen, slowly forgotten."""

    def count(self, context: Context, tokens: float = 1) -> int:
        """Passes to make at once when each gives so many tokens."""
        pass_s = self._pass_s.get(len(context.slots))
        is_first = any(len(context.tokens[slot]) == context.cache.prompts[slot] for slot in context.slots)
        if pass_s is None or is_first:
            return 1
        return max(1, int(min(MOST / tokens, BLOCK_S / max(pass_s, 1e-9))))

    def steps(
        self, context: Context, slot: int, longest: int, weights: Weights, min_confidence: float = 0.0
    ) -> tuple[int, ChainPlan] | None:
        """How many guesses a draft of one sequence may have, and how many drafts to verify at once; None for none."""
        limit, room = min(longest, context.max_nodes.get(slot, longest)), 1 + context.room.get(slot, 0)
        if room == 1 or limit == 0:
            return None
        steps = self.count(context, tokens=2)
        return limit, ChainPlan(min_confidence, weights, steps, min(room, steps * (limit + 1)))

    def timed(self, context: Context, decide: Callable[[], Draft]) -> Draft:
        """What was decided; its passes are timed."""
        started = self._clock()
        draft = decide()
        pass_s = (self._clock() - started) / max(len(passes.kept) for passes in draft.passes)
        seen = self._pass_s.get(len(context.slots), pass_s)
        self._pass_s[len(context.slots)] = min(pass_s, FORGET * seen)
        return draft


def pending(context: Context) -> dict[int, int] | None:
    """The one token of each slot that is not stored yet; None where there are more, or where tokens are drawn."""
    fresh = {slot: context.tokens[slot][context.cache.lengths[slot] :] for slot in context.slots}
    if any(len(tokens) > 1 for tokens in fresh.values()) or not context.distribution.is_greedy(context.slots):
        return None
    return {slot: tokens[0] for slot, tokens in fresh.items()}


def native_chain(model: Decoder, cache: KVCache) -> Chain | None:
    """What drafts or decides in native calls; None where nothing does, or where a session pads its calls."""
    return model.backend.chain if cache.row_count == 1 else None


class MultiStepPlain(NoDrafts):
    """Plain decoding, greedily several tokens in one native call."""

    def __init__(self, model: Decoder, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """For ``model``; ``clock`` tells how long its passes take."""
        super().__init__()
        self._model = model
        self._pace = StepBudget(clock)

    def propose(self, context: Context) -> Draft:
        """The decided tokens, and those that the model decides behind them."""
        chain, roots = native_chain(self._model, context.cache), pending(context)
        if chain is None or roots is None:
            return context.committed()
        more = self._pace.count(context) - 1
        below = [Root(slot, token, min(more, context.room.get(slot, 0))) for slot, token in roots.items()]
        return self._pace.timed(context, lambda: chain.decide(below, context.cache, context.ends))
