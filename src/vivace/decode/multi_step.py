"""Multi-step decoding: one call of the backend makes several steps of some sequences, verification included.

With a small model, returning to Python after each pass takes a quarter of the time of a pass. Where draft rows can be
described as data (``core/draft_rows.py``) and sequences take the argmax, or the argmax of logits that were perturbed
(``core/draws.py``), native code drafts, verifies, and drafts again
from the tokens it kept; the drafter returns the outcome as ``Decided``. In all other cases each step is a ``Draft``
that the session verifies. ``Session(steps_per_call=0)`` makes every drafter work that way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from vivace.core.draft_rows import Chain, ChainPlan, ChainRoot
from vivace.core.draws import Drawing
from vivace.core.model import Decoder
from vivace.core.seams import Context, Decided, Draft
from vivace.decode.plain import NoDrafts

BLOCK_S = 0.05
"""Longest time, in seconds, that the steps of one call may take, so that text still appears evenly."""
RETURNING_S = 0.0003
"""Seconds that it takes a session to handle one sequence between two calls; with hundreds of them that is longer than
their passes on a GPU, so that a call may take as long."""
MAX_TOKENS = 8
"""Largest number of tokens of one call: those after a stop string are thrown away."""
FORGET = 1.02
"""Factor by which the shortest remembered time of a pass grows with each further pass."""


class Deciding(NamedTuple):
    """What one call needs to decode the sequences of a step."""

    chain: Chain
    pending: dict[int, int]
    """The one token of each slot that is not stored yet."""
    drawings: Mapping[int, Drawing]
    """How the tokens of each slot are drawn; one that is not there takes the likeliest."""

    def root(self, slot: int, limit: int) -> ChainRoot:
        """Return the pending token of a slot, with at most ``limit`` tokens below it."""
        return ChainRoot(slot, self.pending[slot], limit, self.drawings.get(slot))


def native_chain(model: Decoder, context: Context) -> Chain | None:
    """Return what drafts or decodes in calls of the backend; None where it has none, where a session pads its calls,
    where it cannot add what an adapter does, or where other machines have entries of a sequence.
    """
    chain, cache, slots = model.backend.chain, context.cache, context.slots
    if chain is None or cache.row_count != 1 or not cache.staged.isdisjoint(slots):
        return None
    return chain if chain.can_wear(cache, slots) else None


def deciding(model: Decoder, context: Context) -> Deciding | None:
    """Return what may decode all sequences of a step; None where the session has to verify each step.

    The session verifies where no native code runs the model, where it allows no steps in one call, where logits are
    processed, and where a slot has more than one token that is not stored yet.
    """
    chain = native_chain(model, context)
    if chain is None or context.steps_per_call == 0:
        return None
    drawings = drawings_of(chain, context)
    if not context.distribution.is_greedy([slot for slot in context.slots if slot not in drawings]):
        return None
    lengths = context.cache.lengths
    if any(len(context.tokens[slot]) != lengths[slot] + 1 for slot in context.slots):
        return None
    return Deciding(chain, {slot: context.tokens[slot][-1] for slot in context.slots}, drawings)


def drawings_of(chain: Chain, context: Context) -> Mapping[int, Drawing]:
    """Return how native code draws the tokens of slots; it cannot for a slot that is not there."""
    return context.drawings if chain.can_draw else {}


class StepBudget:
    """Decides how many steps one call may make: one where a text begins, then as many as take ``BLOCK_S``."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Measure passes with ``clock``, in seconds."""
        self._clock = clock
        self._pass_s: dict[int, float] = {}
        """By number of sequences, rounded up to powers of two: the shortest time of a pass, which slowly grows
        (``FORGET``)."""

    def count(self, context: Context, tokens: float = 1) -> int:
        """Return how many steps to make in one call if each yields ``tokens`` tokens."""
        if context.steps_per_call is not None:
            return context.steps_per_call
        pass_s = self._pass_s.get(_alike(context))
        is_first = any(len(context.tokens[slot]) == context.cache.prompts[slot] for slot in context.slots)
        if pass_s is None or is_first:
            return 1
        longest = max(BLOCK_S, RETURNING_S * len(context.slots))
        return max(1, int(min(MAX_TOKENS / tokens, longest / max(pass_s, 1e-9))))

    def drafts(self, context: Context, slot: int, longest: int, plan: ChainPlan) -> tuple[int, ChainPlan] | None:
        """Return how many guesses a draft of one sequence may have, and ``plan`` for one call that drafts and verifies.

        Returns None where no guess can be used.
        """
        limit, room = min(longest, context.max_nodes.get(slot, longest)), 1 + context.room.get(slot, 0)
        if room == 1 or limit == 0:
            return None
        steps = self.count(context, tokens=2)
        return limit, plan._replace(steps=steps, room=min(room, steps * (limit + 1)))

    def timed(self, context: Context, decide: Callable[[], Decided]) -> Decided:
        """Run ``decide`` and remember how long a pass took."""
        started = self._clock()
        decided = decide()
        pass_s = (self._clock() - started) / max(map(len, decided.steps))
        seen = self._pass_s.get(_alike(context), pass_s)
        self._pass_s[_alike(context)] = min(pass_s, FORGET * seen)
        return decided


def _alike(context: Context) -> int:
    """Return what calls have in common whose numbers of sequences are rounded up to the same power of two."""
    return (len(context.slots) - 1).bit_length()


class MultiStepPlain(NoDrafts):
    """Implements ``Drafter``: plain decoding which makes several tokens in one call where it can."""

    def __init__(self, model: Decoder, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Decode with ``model``; ``clock`` measures its passes in seconds."""
        super().__init__()
        self._model = model
        self._budget = StepBudget(clock)

    def propose(self, context: Context) -> Draft | Decided:
        """Return the committed tokens, or also the tokens that one call has decoded after them."""
        found = deciding(self._model, context)
        if found is None:
            return context.committed()
        more = self._budget.count(context) - 1
        roots = [found.root(slot, min(more, context.room.get(slot, 0))) for slot in found.pending]
        return self._budget.timed(context, lambda: found.chain.decide(roots, context.cache, context.ends))
