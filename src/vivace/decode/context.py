"""What the drafter of some sequences may read when it proposes."""

from __future__ import annotations

from collections.abc import Sequence

from vivace.core.cache import KVCache
from vivace.core.seams import Context
from vivace.decode.distributions import Distributions
from vivace.decode.memory import DRAFT_SLACK
from vivace.decode.sequence import Sequence as Decoding


def context_of(sequences: Sequence[Decoding], cache: KVCache, steps_per_call: int | None) -> Context:
    """Describe sequences of one drafter whose entries are in ``cache``."""
    tokens = {s.slot: s.tokens for s in sequences}
    requests = {s.slot: s.request for s in sequences}
    reach = {s.slot: cache.reach(s.slot) - cache.lengths[s.slot] - 1 for s in sequences}
    room = {s.slot: min(s.request.max_new_tokens - s.num_new - 1, reach[s.slot]) for s in sequences}
    return Context(
        slots=tuple(tokens),
        tokens=tokens,
        cache=cache,
        distribution=Distributions(requests, tokens, cache.lengths),
        max_nodes={slot: min(tokens, DRAFT_SLACK - 1) for slot, tokens in room.items()},
        generators={s.slot: s.generator for s in sequences},
        room={s.slot: 0 if s.request.shows_guesses else room[s.slot] for s in sequences},
        drawings={s.slot: s.drawing for s in sequences if s.drawing is not None},
        steps_per_call=steps_per_call,
        ends=tuple(set[int]().union(*(s.request.stop.end_tokens for s in sequences))),
    )
