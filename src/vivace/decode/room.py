"""What the texts of a session need of memory, when one may begin, and which one gives way.

A request begins when there is room for what has been decided of it so far, and for one block of each text that runs and
may still grow. Before a pass every sequence in it is given the blocks that the pass may write, the oldest first. Where
memory ends, the youngest gives back what it has, keeps its tokens, and is read again later (``Session._preempt``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.decode.isolation import blaming
from vivace.decode.memory import WIDEST_DRAFT, MemoryBudget, text_bytes
from vivace.decode.request import Emitted, Request
from vivace.decode.sequence import Sequence
from vivace.decode.stats import DecodeStats
from vivace.errors import UnsupportedError

Give = Callable[[Sequence, int], None]
"""Gives a sequence blocks up to an entry, or raises ``RequestFailed``."""


class Waiting(NamedTuple):
    """A request that has no slot."""

    id: int
    request: Request
    paused: Sequence | None = None
    """What it was when it lost its slot."""

    @classmethod
    def again(cls, sequence: Sequence) -> Waiting:
        """Return the request of a sequence that is about to lose its slot; its adapter learns that it still counts."""
        if sequence.request.adapter is not None:
            sequence.request.adapter.wait()
        return cls(sequence.id, sequence.request, sequence)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that are decided."""
        return len(self.request.tokens if self.paused is None else self.paused.tokens)

    @property
    def refusal(self) -> Emitted:
        """Return the only event of a request whose prompt a guard has refused."""
        verdict, stats = self.request.refused, self.stats
        assert verdict is not None
        if verdict.category is not None:
            stats.guard = {verdict.category: verdict.score}
        logprobs = () if self.request.logprobs else None
        return Emitted(self.id, (), logprobs, "content_filter", stats)

    @property
    def stats(self) -> DecodeStats:
        """Return its counters, or those to begin with."""
        if self.paused is not None:
            return self.paused.stats
        request = self.request
        return DecodeStats(
            method=request.drafter.name,
            num_prompt_tokens=len(request.tokens if request.source is None else request.source),
            prefill=request.prefill.name,
            prefill_reason=request.prefill_reason,
            prompt_pool=None if request.lead is None else request.lead.name,
        )


class Room:
    """The memory of one session's texts."""

    def __init__(self, model: Decoder, cache: KVCache, memory: MemoryBudget) -> None:
        """Count for texts of ``model`` in ``cache``, whose blocks are taken from ``memory``."""
        self.memory = memory
        self._model = model
        self._cache = cache

    def check(self, request: Request, capacity: int) -> None:
        """Raise an error for a request that no free slot could ever take.

        Args:
            request: what is asked for.
            capacity: prompt and new tokens of a text at most.

        Raises:
            CapacityError: it is longer, it needs more memory than there is for texts, or the model's rotary embedding
                changes before its end.
            UnsupportedError: it is searched with beams, and a part of the model remembers one text only.
        """
        request.check_fits(capacity)
        request.check_entries(self._cache.capacity - WIDEST_DRAFT)
        request.check_rotation(self._model.config)
        request.check_source(self._model.config)
        if request.beams is not None and self._model.stateful and self._model.backend.num_ranks == 1:
            raise UnsupportedError("a store of neurons cannot go on with one text in several ways; leave out num_beams")
        self.memory.check_text(self.most_bytes(request), len(request.tokens) + request.max_new_tokens)

    def most_bytes(self, request: Request) -> int:
        """Return the largest number of bytes that keys and values of a request can take."""
        return text_bytes(self._model, request.drafter, request.num_entries) + self._source_bytes(request)

    def first_bytes(self, request: Request, num_tokens: int | None = None) -> int:
        """Return the bytes of keys and values that a request needs to begin, or to go on with so many tokens."""
        if self.is_pinned(request):
            return self.most_bytes(request)
        text = text_bytes(self._model, request.drafter, num_tokens or len(request.tokens))
        return text + self._source_bytes(request)

    def _source_bytes(self, request: Request) -> int:
        return 0 if request.source is None else self._model.source_bytes(len(request.source))

    def is_pinned(self, request: Request) -> bool:
        """Return whether what a request stores could not be read again, so that it must never lose its memory."""
        can_read_again = request.prefill.is_exact and not self._model.stateful
        return not (can_read_again and request.drafter.leaves_all_entries)

    def has_for(self, waiting: Collection[Waiting], live: Iterable[Sequence]) -> bool:
        """Return whether all these requests can begin: their adapters are in memory, and there is memory for their
        texts and a block for each that runs.
        """
        if not all(each.request.adapter is None or each.request.adapter.is_ready() for each in waiting):
            return False
        needed = sum(self.first_bytes(each.request, each.num_tokens) for each in waiting)
        return self.memory.has_room(needed + self._spare_bytes(live))

    def _spare_bytes(self, live: Iterable[Sequence]) -> int:
        """Return the bytes of one block for each text that may still grow, which a new text must leave free."""
        growing = [s for s in live if self._cache.reach(s.slot) < s.num_entries]
        return sum(self._cache.slot_bytes(1) + s.request.drafter.text_bytes(1) for s in growing)

    def can_wait(self, sequence: Sequence) -> bool:
        """Return whether a sequence may give back what it has and begin again: not one that is pinned and has begun."""
        return not (sequence.is_pinned and self._cache.lengths[sequence.slot])

    def give(self, sequence: Sequence, stop: int) -> None:
        """Give a sequence the blocks of its entries up to ``stop - 1``, in its drafter's own cache too.

        Raises:
            RequestFailed: there is no memory for them now.
        """
        with blaming(sequence.slot, "taking memory for it"):
            for state in (self._cache, sequence.drafting):
                state.extend([sequence.slot], [stop])

    def give_source(self, sequence: Sequence, stop: int) -> None:
        """Give a sequence the blocks of what it reads of its source, whose entries are 0 to ``stop - 1``.

        Raises:
            RequestFailed: there is no memory for them now.
        """
        assert self._cache.beside is not None
        with blaming(sequence.slot, "taking memory for its source"):
            self._cache.beside.extend([sequence.slot], [stop])
