"""Loads active neurons: caches for all layers over an asynchronous reader (Alizadeh et al. 2023, arXiv:2312.11514).

Where the paper differs: it leaves prompts out. Prompt chunks need nearly all neurons, so here they read a layer's
records once, in large blocks, and are computed with all of them. Windows are dropped when a session has no sequence
left, and where predictors are used each session gets its own windows back, so that an answer does not depend on other
sessions. A pass of several rows (a draft) reads what any of its rows needs. Active neurons for which there is no room
are read block by block, and add to the sum without being kept.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.seams import Memory
from vivace.kernels.native import NativeBody
from vivace.storage.budget import MemoryPlan, block_of
from vivace.storage.io.async_reader import AsyncReader, PendingRead
from vivace.storage.io.readers import aligned
from vivace.storage.neurons.cache import NeuronCache, Window, runs
from vivace.storage.neurons.predictors import Predictor, load_predictors
from vivace.storage.neurons.thresholds import load_thresholds
from vivace.storage.store import Bundle, Store

WINDOW = 4
"""Tokens whose neurons stay in memory, where the budget has room for them."""

DENSE_SHARE = 0.75
"""Where more of a layer is active than this, and than fits, all of it is read in large blocks."""


@dataclass
class NeuronCounts:
    """Totals since the loader was made."""

    passes: int = 0
    """Layers that ran with a part of their neurons."""
    dense: int = 0
    """Layers that ran with all of them."""
    active: int = 0
    """Neurons that were active."""
    read: int = 0
    """Neurons that had to be read for that."""
    excess: int = 0
    """Those among them that there was no room to keep."""
    manage_s: float = 0.0
    """Seconds spent on bookkeeping and on moving rows."""


class Records(NamedTuple):
    """Neurons in memory, of which those from ``first`` to ``stop`` count; the others are left from earlier."""

    neurons: Tensor
    """(n,) int64, their numbers."""
    parts: dict[str, Tensor]
    """gate, up and down, each (n, E)."""
    first: int
    stop: int


class NeuronLoader:
    """Brings active neurons into the caches of all layers, which sessions share one after the other."""

    def __init__(
        self,
        store: Store,
        reader: AsyncReader,
        room: int,
        *,
        thresholds: Sequence[float],
        predictors: Sequence[Predictor],
        window: int,
    ) -> None:
        """Allocate the caches of all layers.

        Args:
            store: of layout ``neurons`` or ``selected``.
            reader: reads its file.
            room: neurons of a layer in memory.
            thresholds: one for each layer, in the layout ``selected``.
            predictors: one for each layer, in the layout ``neurons``.
            window: tokens whose neurons stay in memory.
        """
        self.store = store
        self.reader = reader
        self.thresholds = thresholds
        self.predictors = predictors
        self.counts = NeuronCounts()
        self.body: NativeBody | None = None
        """Native kernels for neurons with a gate and no biases, in bfloat16; PyTorch runs all others."""
        self.selectors: dict[int, Tensor] = {}
        bundle = store["layers.0.neurons"]
        layers = range(store.config.num_layers)
        self.caches = [NeuronCache(bundle.count, room, bundle.stride, window) for _ in layers]
        self.block = block_of(bundle.count, bundle.stride)
        """Neurons that are read together where a layer runs with all of them."""
        self._blocks = [aligned(self.block * bundle.stride) for _ in range(2)]
        self._user: ref[Memory] | None = None
        """Memory of the session whose tokens the caches hold."""
        self._left: WeakKeyDictionary[Memory, list[Window]] = WeakKeyDictionary()
        """Windows of sessions that another one has taken over from."""

    def open(self, cache: KVCache) -> NeuronState:
        """Open the state of a session, which gives its windows up when no sequence is left."""
        return NeuronState(self, cache)

    def take(self, memory: Memory) -> None:
        """Give the caches to the session of this memory.

        A neuron that a predictor missed is computed if it happens to be in memory, so an answer would change with the
        tokens of another session. Therefore what this session held last is read again, each neuron into its row. With
        selectors the result does not depend on what is in memory, so the caches stay as they are.

        Raises:
            CheckpointError: the neurons cannot be read; the caches are empty then.
        """
        last = None if self._user is None else self._user()
        if last is memory:
            return
        self._user = ref(memory)
        if not self.predictors:
            return
        if last is not None:
            self._left[last] = [cache.held() for cache in self.caches]
        windows = self._left.pop(memory, None)
        if windows is None:
            self._forget()
        else:
            self._bring_back(windows)

    def _bring_back(self, windows: Sequence[Window]) -> None:
        reads = []
        try:
            for layer, (cache, window) in enumerate(zip(self.caches, windows, strict=True)):
                bundle = self.store[f"layers.{layer}.neurons"]
                extents = cache.restore(window).extents(bundle.offset, bundle.stride)
                reads.append(self.reader.submit(cache.memory, extents))
                self.counts.read += len(window.neurons)
            for read in reads:
                read.wait()
        except BaseException:  # also an interruption: what has not arrived must not pass for neurons
            _empty(self.caches, reads)
            raise

    def leave(self, memory: Memory) -> None:
        """Forget the windows of a session without sequences, so that its next one does not depend on the last."""
        self._left.pop(memory, None)
        if self._user is not None and self._user() is memory:
            self._forget()

    def _forget(self) -> None:
        for cache in self.caches:
            cache.forget()

    @staticmethod
    def of(store: Store, reader: AsyncReader, plan: MemoryPlan, window: int = WINDOW) -> NeuronLoader:
        """Make one for a memory plan, with the predictors or thresholds of the store.

        Raises:
            NotFoundError: layout ``neurons`` without predictors.
            MismatchError: they are for another model.
        """
        is_guessed = store.layout == "neurons"
        return NeuronLoader(
            store,
            reader,
            plan.neurons_per_layer,
            thresholds=[] if is_guessed else load_thresholds(store),
            predictors=load_predictors(store) if is_guessed else [],
            window=window,
        )

    def select_by(self, bundle: str, matrix: Tensor) -> None:
        """Take the selector (F, E) of a layer, by the name of its bundle."""
        self.selectors[int(bundle.split(".")[1])] = matrix

    def is_dense(self, layer: int, active: Tensor) -> bool:
        """Whether so many neurons are active, and do not fit, that the whole layer is better read in large blocks."""
        cache = self.caches[layer]
        return len(active) > max(cache.room, int(DENSE_SHARE * len(cache.row_of)))

    def bring(self, layer: int, active: Tensor) -> Iterator[Records]:
        """Yield records that contain these neurons: those in memory, then those read into it, then those without room.

        Each is valid until the next is asked for.

        Raises:
            CheckpointError: they cannot be read; the cache of the layer is empty then.
        """
        cache, bundle = self.caches[layer], self.store[f"layers.{layer}.neurons"]
        begun = time.perf_counter()
        wanted = cache.turn(active)
        excess = list(cache.excess.split(self.block)) if len(cache.excess) else []
        reads: list[PendingRead] = []
        self.counts.passes += 1
        self.counts.active += len(active)
        num_wanted = int(wanted.lengths.sum())
        self.counts.read += num_wanted + len(cache.excess)
        self.counts.excess += len(cache.excess)
        try:
            reads.append(self.reader.submit(cache.memory, wanted.extents(bundle.offset, bundle.stride)))
            reads += [self._begin(bundle, excess, place) for place in range(min(2, len(excess)))]
            self.counts.manage_s += time.perf_counter() - begun
            records = self.store.records(bundle.name, cache.rows)
            kept = cache.num_used - num_wanted
            yield Records(cache.pointer, records, 0, kept)
            reads[0].wait()
            yield Records(cache.pointer, records, kept, cache.num_used)
            for place, neurons in enumerate(excess):
                reads[1 + place].wait()
                rows = torch.frombuffer(self._blocks[place % 2], dtype=torch.uint8).view(-1, bundle.stride)
                which = F.pad(neurons, (0, len(rows) - len(neurons)))
                yield Records(which, self.store.records(bundle.name, rows), 0, len(neurons))
                if place + 2 < len(excess):
                    reads.append(self._begin(bundle, excess, place + 2))
        except (Exception, KeyboardInterrupt):  # not where its user gives up, which may be noticed passes later
            _empty([cache], reads)
            raise
        finally:
            for read in reads:
                read.join()

    def _begin(self, bundle: Bundle, excess: list[Tensor], place: int) -> PendingRead:
        extents = runs(excess[place], 0).extents(bundle.offset, bundle.stride)
        return self.reader.submit(self._blocks[place % 2], extents)

    def every(self, layer: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield all records of a layer, block by block: the first neuron, and its parts (n, E) with those behind it.

        A block is valid until the next is asked for, which is read meanwhile.

        Raises:
            CheckpointError: they cannot be read.
        """
        self.counts.dense += 1
        bundle = self.store[f"layers.{layer}.neurons"]
        starts = range(0, bundle.count, self.block)
        views = [
            self._blocks[place % 2][: min(self.block, bundle.count - start) * bundle.stride]
            for place, start in enumerate(starts)
        ]
        reads = deque([self.reader.submit_whole(views[0], bundle.start(0))])
        try:
            for place, start in enumerate(starts):
                reads[0].wait()
                reads.popleft()
                if place + 1 < len(starts):
                    reads.append(self.reader.submit_whole(views[place + 1], bundle.start(starts[place + 1])))
                memory = torch.frombuffer(views[place], dtype=torch.uint8).view(-1, bundle.stride)
                yield start, self.store.records(bundle.name, memory)
        finally:
            for read in reads:
                read.join()


def _empty(caches: Sequence[NeuronCache], reads: Sequence[PendingRead]) -> None:
    """Forget what caches hold, and zero their rows once no read is under way: 0 times a NaN left there is no number."""
    for cache in caches:
        cache.forget()
    for read in reads:
        read.join()
    for cache in caches:
        cache.rows.zero_()


class NeuronState:
    """Implements ``SlotState`` for one session: knows which of its sequences have used the caches."""

    def __init__(self, loader: NeuronLoader, cache: KVCache) -> None:
        """Tell ``loader`` when no sequence is left in ``cache``."""
        self._loader = loader
        self._cache = cache
        self._live: set[int] = set()

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Note that these sequences use the caches."""
        self._live.update(slots)

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Do nothing: neurons in memory are right for any text."""

    def release(self, slots: Sequence[int]) -> None:
        """Give the windows up when no sequence is left."""
        self._live.difference_update(slots)
        if not self._live:
            self._loader.leave(self._cache)

    def saved(self) -> object:
        """Return nothing: a sequence that has stored something uses the caches until it is released."""
        return None

    def restore(self, saved: object) -> None:
        """Do nothing: the windows are those of all sequences."""
