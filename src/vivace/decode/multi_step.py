"""Multi-step decoding: several steps of greedy sequences, verification included, in one native call.

At a small model the way to Python and back takes a quarter as long as a pass of the whole model. Where a drafter can be
written down as data (``core/draft_rows.py``) and its sequences take the argmax, native code drafts, verifies and begins
again from what it kept; the drafter proposes the outcome as ``Decided``. Everything else goes step by step, as a
``Draft`` that the session verifies. ``Session(steps_per_call=0)`` makes every drafter do so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from vivace.core.draft_rows import Chain, ChainPlan, ChainRoot
from vivace.core.model import Decoder
from vivace.core.seams import Context, Decided, Draft
from vivace.decode.plain import NoDrafts
from vivace.kernels.low_bit import Weights

BLOCK_S = 0.05
"""Tokens that come together take no longer than this to make, so that a text still grows evenly."""
MAX_TOKENS = 8
"""And there are never more of them: what lies behind a stop string was in vain."""
FORGET = 1.02
"""Growth of what is remembered of a pass with each further one."""


class Deciding(NamedTuple):
    """What may decide for the sequences of a step."""

    chain: Chain
    pending: dict[int, int]
    """The one token of each slot that is not stored yet."""


def native_chain(model: Decoder, context: Context) -> Chain | None:
    """What drafts or decides in native calls; None where nothing does, or where a session pads its calls."""
    return model.backend.chain if context.cache.row_count == 1 else None


def deciding(model: Decoder, context: Context) -> Deciding | None:
    """What may decide for all sequences of a step; None where each step has to be verified by the session.

    That is where no native code runs the model, the session allows no steps in one call, tokens are drawn or
    processed, or a slot carries an adapter or has more than one token that is not stored yet.
    """
    chain = native_chain(model, context)
    if chain is None or context.steps_per_call == 0 or not context.distribution.is_greedy(context.slots):
        return None
    if context.cache.adapters.any_of(context.slots):  # native calls carry the deltas of draft rows alone
        return None
    lengths = context.cache.lengths
    if any(len(context.tokens[slot]) != lengths[slot] + 1 for slot in context.slots):
        return None
    return Deciding(chain, {slot: context.tokens[slot][-1] for slot in context.slots})


class StepBudget:
    """How many steps one native call may make: one where a text begins, then what fits into ``BLOCK_S``."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock`` tells how long passes take."""
        self._clock = clock
        self._pass_s: dict[int, float] = {}
        """Of one over so many sequences: the shortest seen, slowly forgotten."""

    def count(self, context: Context, tokens: float = 1) -> int:
        """Return the steps to make at once when each gives so many tokens."""
        if context.steps_per_call is not None:
            return context.steps_per_call
        pass_s = self._pass_s.get(len(context.slots))
        is_first = any(len(context.tokens[slot]) == context.cache.prompts[slot] for slot in context.slots)
        if pass_s is None or is_first:
            return 1
        return max(1, int(min(MAX_TOKENS / tokens, BLOCK_S / max(pass_s, 1e-9))))

    def drafts(
        self, context: Context, slot: int, longest: int, weights: Weights, min_confidence: float = 0.0
    ) -> tuple[int, ChainPlan] | None:
        """Return how many guesses a draft of one sequence may have, and how many drafts to verify at once.

        None where there is no room for a guess.
        """
        limit, room = min(longest, context.max_nodes.get(slot, longest)), 1 + context.room.get(slot, 0)
        if room == 1 or limit == 0:
            return None
        steps = self.count(context, tokens=2)
        return limit, ChainPlan(min_confidence, weights, steps, min(room, steps * (limit + 1)))

    def timed(self, context: Context, decide: Callable[[], Decided]) -> Decided:
        """Let steps be made, and remember how long a pass took."""
        started = self._clock()
        decided = decide()
        pass_s = (self._clock() - started) / max(map(len, decided.steps))
        seen = self._pass_s.get(len(context.slots), pass_s)
        self._pass_s[len(context.slots)] = min(pass_s, FORGET * seen)
        return decided


class MultiStepPlain(NoDrafts):
    """Fills ``Drafter``: plain decoding, greedily several tokens in one native call."""

    def __init__(self, model: Decoder, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """For ``model``; ``clock`` tells how long its passes take."""
        super().__init__()
        self._model = model
        self._budget = StepBudget(clock)

    def propose(self, context: Context) -> Draft | Decided:
        """The decided tokens, or also those that the model decides behind them."""
        found = deciding(self._model, context)
        if found is None:
            return context.committed()
        more = self._budget.count(context) - 1
        roots = [ChainRoot(slot, token, min(more, context.room.get(slot, 0))) for slot, token in found.pending.items()]
        return self._budget.timed(context, lambda: found.chain.decide(roots, context.cache, context.ends))
