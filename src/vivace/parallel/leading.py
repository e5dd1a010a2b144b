"""Rank 0's side of a shared model: it tells the others about every pass and every change of a cache.

The decoder on rank 0 holds its share of every layer like all ranks. Whoever runs it sees a decoder whose backend runs
several layers in one call (``LedSpan``): before the layers run here, the pass is sent to the other ranks, and where
products are added all of them meet. So sessions, methods and the server need not know that there are other ranks.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from vivace.core.backend import Backend
from vivace.core.cache import KVCache
from vivace.core.draft_rows import Chain
from vivace.core.low_rank import FixedFactors
from vivace.core.model import Decoder
from vivace.core.seams import SlotState, Span
from vivace.core.split_layers import SplitLayers
from vivace.core.step import Step
from vivace.errors import UnsupportedError
from vivace.kernels.low_bit import Weights
from vivace.parallel import passes
from vivace.parallel.world import World


class Leader:
    """Sends to the other ranks what they follow; implements ``Stateful``, so that every session reports to it."""

    def __init__(self, world: World, offset: int = 0) -> None:
        """Lead the other ranks of a world; ``offset`` is added to the numbers of operations where there are two."""
        self.world = world
        self.offset = offset
        self.turn = threading.RLock()
        """Held during a pass and while a message is sent: passes of several threads follow one another."""
        self._caches: WeakKeyDictionary[KVCache, int] = WeakKeyDictionary()
        self._numbers = itertools.count()
        self._dropped: deque[int] = deque()
        """Caches that are gone and that the others have not been told about."""

    def open(self, cache: KVCache) -> SlotState:
        """Return what reports a session's changes of its cache."""
        self.number_of(cache)
        return LedSlots(self, cache)

    def number_of(self, cache: KVCache) -> int:
        """Return the number by which the ranks call a cache; they make their parts of it when it is new."""
        found = self._caches.get(cache)
        if found is None:
            found = self._caches[cache] = next(self._numbers)
            weakref.finalize(cache, self._dropped.append, found).atexit = False
            self.tell(passes.OPEN, found, cache.num_slots, cache.capacity, cache.row_count)
        return found

    def tell(self, operation: int, *numbers: int) -> None:
        """Send a message of integers to all other ranks."""
        with self.turn:
            while self._dropped:
                self.world.tell(passes.packed(self.offset + passes.CLOSE, [self._dropped.popleft()]))
            self.world.tell(passes.packed(self.offset + operation, numbers))

    def begin(self, h: Tensor, step: Step, start: int, stop: int) -> None:
        """Send a pass and its rows to all other ranks."""
        memory = step.memory
        number = self.number_of(memory) if isinstance(memory, KVCache) else None
        self.world.tell(passes.pack_pass(step, number, start, stop, self.offset), h.contiguous())


class LedSlots:
    """Implements ``SlotState``: repeats on the other ranks what a session does with its cache."""

    def __init__(self, leader: Leader, cache: KVCache) -> None:
        """Report what happens to a cache."""
        self._leader = leader
        self._cache = weakref.ref(cache)

    @property
    def _number(self) -> int:
        """The number of the cache, which the other ranks have from the first time that it is asked for."""
        cache = self._cache()
        assert cache is not None
        return self._leader.number_of(cache)

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep these draft nodes on all ranks."""
        self._leader.tell(passes.COMMIT, self._number, *passes.pack_lists([slots, *paths]))

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Forget positions from these lengths on, on all ranks."""
        self._leader.tell(passes.TRUNCATE, self._number, *passes.pack_lists([slots, lengths]))

    def release(self, slots: Sequence[int]) -> None:
        """Forget these sequences on all ranks, as long as there are any."""
        if not self._leader.world.has_ended:
            self._leader.tell(passes.RELEASE, self._number, *slots)

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Let each target begin with what its source has, on all ranks."""
        self._leader.tell(passes.FORK, self._number, *passes.pack_lists([sources, targets]))

    def saved(self) -> object:
        """Return the lengths of all slots, which the ranks have in common."""
        cache = self._cache()
        assert cache is not None
        return tuple(cache.lengths)

    def restore(self, saved: object) -> None:
        """Set all ranks' caches back to these lengths."""
        assert isinstance(saved, tuple)
        self._leader.tell(passes.RESTORE, self._number, *saved)


class LedSpan:
    """Implements ``Span``: runs layers on all ranks."""

    def __init__(self, decoder: Decoder, leader: Leader, inner: Span | None) -> None:
        """Run the layers of rank 0's decoder here, as ``inner`` does where it can, and their others on other ranks."""
        self.is_native = getattr(decoder.backend, "body", None) is not None
        self._layers: list[nn.Module] = list(decoder.layers)
        self.leader = leader
        self._inner = inner

    def covers(self, step: Step) -> bool:
        """Return True: a call that the other ranks cannot run is refused.

        Raises:
            UnsupportedError: rows carry low-rank deltas, or a layer lacks prompt tokens that others have.
        """
        if step.low_rank:
            raise UnsupportedError("adapters on rows are not supported on several ranks; leave out --parallel")
        if isinstance(step.memory, KVCache) and step.memory.has_pruned:
            raise UnsupportedError("prompts are not pruned on several ranks; leave out --prefill")
        return True

    def run(self, h: Tensor, step: Step, start: int, stop: int) -> Tensor:
        """Run rows (T, E) through layers start..stop-1 on all ranks; all of them end with the same rows."""
        leader = self.leader
        with leader.turn, leader.world.unbroken():
            leader.begin(h, step, start, stop)
            return self.run_here(h, step, start, stop)

    def run_here(self, h: Tensor, step: Step, start: int, stop: int) -> Tensor:
        """Run rows (T, E) through rank 0's part of layers start..stop-1, as its own backend does."""
        if self._inner is not None and self._inner.covers(step):
            return self._inner.run(h, step, start, stop)
        for layer in self._layers[start:stop]:
            h = layer(h, step)
        return h

    def quantized(self, start: int, stop: int, weights: Weights) -> LedSpan:
        """Refuse: drafts with other weights would need them on all ranks.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(f"drafts with {weights} weights are not supported on several ranks")


class LedBackend:
    """Implements ``Backend``: another backend lays out this rank's share, and layers run on all ranks."""

    keeps_codes = False
    """A rank's share of a matrix is cut from its weights."""

    def __init__(self, inner: Backend, leader: Leader) -> None:
        """Take the backend of rank 0's layers."""
        self.inner = inner
        self._leader = leader
        self.weights: Weights = inner.weights
        self.span: Span | None = None
        self.split: SplitLayers | None = None
        self.chain: Chain | None = None
        self.num_ranks = leader.world.size
        self.rows_up_to = inner.rows_up_to
        self.body = getattr(inner, "body", None)

    def pack_ends(self, decoder: Decoder) -> None:
        """Lay out the embedding, the final norm and the head."""
        self.inner.pack_ends(decoder)

    def pack_layer(self, decoder: Decoder, index: int) -> None:
        """Lay out this rank's share of a layer."""
        self.inner.pack_layer(decoder, index)

    def finish(self, decoder: Decoder) -> None:
        """Prepare the span over all ranks."""
        self.inner.finish(decoder)
        self.rows_up_to = self.inner.rows_up_to
        self.span = LedSpan(decoder, self._leader, self.inner.span)

    def projection(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        """Make a module that multiplies by a matrix (out, in) of a method, on this rank alone."""
        return self.inner.projection(weight, bias)

    def lay_out(self, factors: FixedFactors) -> int:
        """Refuse: adapters would have to be divided like the matrices beside them.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("LoRAs are not worn by a model on several ranks; leave out the adapter, or --parallel")

    def sibling(self) -> Backend:
        """Make a backend for another decoder, which runs on this rank alone."""
        return self.inner.sibling()
