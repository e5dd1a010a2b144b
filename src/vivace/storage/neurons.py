"""Feed-forwards of which only the active neurons are read (Alizadeh et al. 2023, LLM in a flash, arXiv:2312.11514).

Who is active is decided by one of two:

* ``selected``: the gate's matrix (or, without a gate, up's) stays in memory and is computed exactly; neurons whose
  activation is larger in size than a threshold are active (Lee et al. 2024, CATS, arXiv:2404.08763). With ReLU and
  threshold 0 nothing is left out. The others count as zero, so the answer does not depend on what happens to be in
  memory.
* ``neurons``: low-rank predictors guess it from the input (``predictors.py``). What was not guessed but is in memory
  is computed too: a longer window misses less.

Where the paper differs: it leaves prompts out. Prompt chunks need nearly all neurons, so here they read a layer's
records once, in large blocks, and are computed with all of them. Windows are forgotten when a session has no sequence
left, and where predictors guess each session gets back its own, so that an answer does not depend on others. Drafts of
several rows read what any of their rows needs. Active neurons that memory has no room for are read block by block, and
add to the sum without being kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.cache import KVCache
from vivace.core.config import ModelConfig
from vivace.core.layers import activate
from vivace.core.parts import DenseParts
from vivace.core.seams import Memory, Stateful
from vivace.core.step import Step
from vivace.errors import UnsupportedError, VivaceError
from vivace.kernels import reference as kernels
from vivace.kernels.native import NativeBody
from vivace.storage.budget import MemoryPlan, block_of
from vivace.storage.neuron_cache import NeuronCache, Window, runs
from vivace.storage.pools import Pool, Ticket, whole
from vivace.storage.predictors import Predictor, load_predictors
from vivace.storage.readers import aligned
from vivace.storage.store import Bundle, Store
from vivace.storage.thresholds import load_thresholds

WINDOW = 4
"""Tokens whose neurons stay in memory, where the budget has room for them."""


DENSE_SHARE = 0.75
"""Where more of a layer is active than this, and than fits, all of it is read in large blocks."""

TOGETHER = 128
"""Neurons of one of PyTorch's products: it compiles a kernel for each shape, and keeps it with its working space."""


@dataclass
class NeuronCounts:
    """What happened since the beginning."""

    passes: int = 0
    """Layers run with a part of their neurons."""
    dense: int = 0
    """Layers run with all of them."""
    active: int = 0
    """Neurons that were asked for."""
    read: int = 0
    """Neurons that had to be read for them."""
    excess: int = 0
    """Of those, neurons that there was no room to keep."""
    manage_s: float = 0.0
    """Seconds spent on bookkeeping and moving rows."""


class Records(NamedTuple):
    """Neurons in memory, of which some count and the others are left from earlier."""

    neurons: Tensor
    """(n,) which they are."""
    parts: dict[str, Tensor]
    """Each (n, E): gate, up and down."""
    first: int
    stop: int
    """Those between count."""


class Neurons:
    """The caches of all layers, which sessions share; windows hold tokens of the session that ran last."""

    def __init__(
        self,
        store: Store,
        pool: Pool,
        room: int,
        *,
        thresholds: Sequence[float],
        predictors: Sequence[Predictor],
        window: int,
    ) -> None:
        """Allocate.

        Args:
            store: layout ``neurons`` or ``selected``.
            pool: reads it.
            room: neurons of a layer in memory.
            thresholds: one a layer, for the layout ``selected``.
            predictors: one a layer, for the layout ``neurons``.
            window: tokens whose neurons stay in memory.
        """
        self.store = store
        self.pool = pool
        self.thresholds = thresholds
        self.predictors = predictors
        self.counts = NeuronCounts()
        self.body: NativeBody | None = None
        """Computes with neurons that have a gate and no biases, in bfloat16; all others are PyTorch's."""
        self.selectors: dict[int, Tensor] = {}
        bundle = store["layers.0.neurons"]
        layers = range(store.config.num_layers)
        self.caches = [NeuronCache(bundle.count, room, bundle.stride, window) for _ in layers]
        self.block = block_of(bundle.count, bundle.stride)
        """Neurons in a block of a dense pass."""
        self._blocks = [aligned(self.block * bundle.stride) for _ in range(2)]
        self._user: ref[Memory] | None = None
        """Memory of the session whose tokens the windows hold."""
        self._left: WeakKeyDictionary[Memory, list[Window]] = WeakKeyDictionary()
        """Windows of sessions that others took over from."""

    def open(self, cache: KVCache) -> NeuronState:
        """State of a session."""
        return NeuronState(self, cache)

    def take(self, memory: Memory) -> None:
        """The windows go over to the session of this memory.

        What a predictor did not guess is computed if it happens to be in memory, so an answer would change with the
        tokens of another session: what this one held last is read again, each neuron into its row. Selected neurons
        are the same whatever is in memory, and stay.

        Raises:
            CheckpointError: they cannot be read; the windows begin anew.
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
        tickets = []
        for layer, (cache, window) in enumerate(zip(self.caches, windows, strict=True)):
            bundle = self.store[f"layers.{layer}.neurons"]
            extents = cache.restore(window).extents(bundle.offset, bundle.stride)
            tickets.append(self.pool.submit(cache.memory, extents))
            self.counts.read += len(window.neurons)
        try:
            for ticket in tickets:
                ticket.wait()
        except VivaceError:
            self._forget()
            raise
        finally:
            for ticket in tickets:
                ticket.settle()

    def leave(self, memory: Memory) -> None:
        """The session of this memory has no sequence left: its next one does not depend on those before it."""
        self._left.pop(memory, None)
        if self._user is not None and self._user() is memory:
            self._forget()

    def _forget(self) -> None:
        for cache in self.caches:
            cache.forget()

    @staticmethod
    def of(store: Store, pool: Pool, plan: MemoryPlan, window: int = WINDOW) -> Neurons:
        """For a plan, with the predictors or thresholds of the store.

        Raises:
            NotFoundError: layout ``neurons`` without predictors.
            MismatchError: they are for another model.
        """
        is_guessed = store.layout == "neurons"
        return Neurons(
            store,
            pool,
            plan.neurons_per_layer,
            thresholds=[] if is_guessed else load_thresholds(store),
            predictors=load_predictors(store) if is_guessed else [],
            window=window,
        )

    def select_by(self, bundle: str, matrix: Tensor) -> None:
        """Take a selector (F, E), by the name of its bundle."""
        self.selectors[int(bundle.split(".")[1])] = matrix

    def is_dense(self, layer: int, active: Tensor) -> bool:
        """Whether so much is active, and does not fit, that reading all of the layer is simpler."""
        cache = self.caches[layer]
        return len(active) > max(cache.room, int(DENSE_SHARE * len(cache.row_of)))

    def bring(self, layer: int, active: Tensor) -> Iterator[Records]:
        """Records that have these neurons among them: what is in memory, what comes there, what it has no room for.

        Each is good until the next is asked for.

        Raises:
            CheckpointError: they cannot be read; the layer's window begins anew.
        """
        cache, bundle = self.caches[layer], self.store[f"layers.{layer}.neurons"]
        begun = time.perf_counter()
        wanted = cache.turn(active)
        excess = list(cache.excess.split(self.block)) if len(cache.excess) else []
        tickets = [self.pool.submit(cache.memory, wanted.extents(bundle.offset, bundle.stride))]
        tickets += [self._begin(bundle, excess, place) for place in range(min(2, len(excess)))]
        self.counts.passes += 1
        self.counts.active += len(active)
        num_wanted = int(wanted.lengths.sum())
        self.counts.read += num_wanted + len(cache.excess)
        self.counts.excess += len(cache.excess)
        self.counts.manage_s += time.perf_counter() - begun
        try:
            records = self.store.records(bundle.name, cache.rows)
            kept = cache.num_used - num_wanted
            yield Records(cache.pointer, records, 0, kept)
            tickets[0].wait()
            yield Records(cache.pointer, records, kept, cache.num_used)
            for place, neurons in enumerate(excess):
                tickets[1 + place].wait()
                rows = torch.frombuffer(self._blocks[place % 2], dtype=torch.uint8).view(-1, bundle.stride)
                which = F.pad(neurons, (0, len(rows) - len(neurons)))
                yield Records(which, self.store.records(bundle.name, rows), 0, len(neurons))
                if place + 2 < len(excess):
                    tickets.append(self._begin(bundle, excess, place + 2))
        except VivaceError:
            cache.forget()
            cache.rows.zero_()
            raise
        finally:
            for ticket in tickets:
                ticket.settle()

    def _begin(self, bundle: Bundle, excess: list[Tensor], place: int) -> Ticket:
        extents = runs(excess[place], 0).extents(bundle.offset, bundle.stride)
        return self.pool.submit(self._blocks[place % 2], extents)

    def every(self, layer: int) -> NeuronBlocks:
        """All records of a layer, block by block."""
        self.counts.dense += 1
        return NeuronBlocks(self.store, self.pool, f"layers.{layer}.neurons", self.block, self._blocks)


class NeuronState:
    """Fills ``SlotState`` for one session: which of its sequences have used the windows."""

    def __init__(self, neurons: Neurons, cache: KVCache) -> None:
        """Tell ``neurons`` when nothing is left in ``cache``."""
        self._neurons = neurons
        self._cache = cache
        self._live: set[int] = set()

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """These sequences use the windows."""
        self._live.update(slots)

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """What is in memory is right whatever the text is."""

    def release(self, slots: Sequence[int]) -> None:
        """Let the windows go when nobody is left."""
        self._live.difference_update(slots)
        if not self._live:
            self._neurons.leave(self._cache)

    def saved(self) -> object:
        """Nothing: a sequence that has stored something once uses the windows until it is released."""
        return None

    def restore(self, saved: object) -> None:
        """Nothing to go back to."""


class NeuronBlocks:
    """Iterates over (first neuron, parts (n, E)) of a layer; a block is good until the next is asked for."""

    def __init__(self, store: Store, pool: Pool, name: str, block: int, buffers: Sequence[memoryview]) -> None:
        self._store = store
        self._pool = pool
        self._name = name
        self._starts = list(range(0, store[name].count, block))
        self._block = block
        self._buffers = buffers
        self._ticket: Ticket | None = None
        self._next = 0

    def __iter__(self) -> NeuronBlocks:
        self._ticket = self._begin(0)
        return self

    def __next__(self) -> tuple[int, dict[str, Tensor]]:
        place = self._next
        if place == len(self._starts):
            raise StopIteration
        assert self._ticket is not None
        self._next += 1
        ticket = self._ticket
        try:
            ticket.wait()
        finally:
            if self._next < len(self._starts):
                self._ticket = self._begin(self._next)
        first = self._starts[place]
        memory = torch.frombuffer(self._view(place), dtype=torch.uint8).view(-1, self._store[self._name].stride)
        return first, self._store.records(self._name, memory)

    def _view(self, place: int) -> memoryview:
        bundle = self._store[self._name]
        count = min(self._block, bundle.count - self._starts[place])
        return self._buffers[place % 2][: count * bundle.stride]

    def _begin(self, place: int) -> Ticket:
        return self._pool.submit(*whole(self._store[self._name].start(self._starts[place]), self._view(place)))


class Bias(nn.Module):
    """The bias of a matrix that is not in memory."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(width)) if bias else None


class NeuronFeedForward(nn.Module):
    """``down(act(gate(x)) * up(x))`` or ``down(act(up(x)))`` over the neurons that are active."""

    def __init__(self, config: ModelConfig, layer: int, neurons: Neurons) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.neurons = neurons
        self.up = Bias(config.ffn_width * (2 if config.gated else 1), bias=config.ffn_bias)
        self.down = Bias(config.width, bias=config.ffn_bias)

    def forward(self, x: Tensor, step: Step, add: Tensor | None = None) -> Tensor:
        """(T, E) -> (T, E).

        Raises:
            UnsupportedError: a call with low-rank terms inside the feed-forward, or one to learn from.
            CheckpointError: neurons cannot be read.
        """
        sites = [(self.layer, site) for site in ("gate", "up", "down")]
        if any(site in deltas.down for deltas in step.deltas for site in sites):
            raise UnsupportedError("adapters on feed-forwards need them whole; convert the model with layout layers")
        if torch.is_grad_enabled() and x.requires_grad:
            raise UnsupportedError("adapters learn from every neuron; convert the model with layout layers")
        is_prompt = step.chunk is not None or step.grid is not None
        if not is_prompt:
            self.neurons.take(step.memory)
        y = None if is_prompt else self._some(x)
        y = self._all(x) if y is None else y
        if self.down.bias is not None:
            y = y + self.down.bias
        y = y.to(x.dtype)
        return y if add is None else add + y

    def _some(self, x: Tensor) -> Tensor | None:
        """With the active neurons, without the last bias; None where all are read."""
        neurons = self.neurons
        gate = self._gate(x)
        if gate is None:
            active = neurons.predictors[self.layer].active(x, neurons.body)
        else:
            gate = torch.where(gate.abs() > neurons.thresholds[self.layer], gate, 0.0)
            active = (gate != 0).any(0).nonzero()[:, 0]
        if neurons.is_dense(self.layer, active):
            return None
        y = x.new_zeros(x.shape, dtype=torch.float32)
        body = neurons.body if gate is None and self.config.gated and self.up.bias is None else None
        for records in neurons.bring(self.layer, active):
            if body is None:
                self._add(x, records, gate, y)
            elif records.first < records.stop:
                parts = {name: part[records.first : records.stop] for name, part in records.parts.items()}
                body.add_neurons(parts, x, y, self.config.activation)
        return y

    def _add(self, x: Tensor, records: Records, gate: Tensor | None, y: Tensor) -> None:
        """Add what neurons send to ``y`` (T, E)."""
        for first in range(records.first, records.stop, TOGETHER):
            at = max(0, min(first, len(records.neurons) - TOGETHER))
            found = {name: part[at : at + TOGETHER] for name, part in records.parts.items()}
            inner = self._inner(x, found, records.neurons[at : at + TOGETHER], gate)
            inner[:, : first - at] = 0
            inner[:, records.stop - at :] = 0
            y += inner @ found["down"]

    def _all(self, x: Tensor) -> Tensor:
        """With all neurons, block by block, without the last bias."""
        gate = self._gate(x)
        y = x.new_zeros(x.shape, dtype=torch.float32)
        for first, found in self.neurons.every(self.layer):
            which = torch.arange(first, first + len(found["down"]))
            y += self._inner(x, found, which, gate) @ found["down"]
        return y

    def _gate(self, x: Tensor) -> Tensor | None:
        """Activations of the selector, (T, F); None where there is none."""
        if self.layer not in self.neurons.selectors:
            return None
        bias = None if self.up.bias is None else self.up.bias[: self.config.ffn_width]
        return activate(kernels.linear(x, self.neurons.selectors[self.layer], bias), self.config.activation)

    def _inner(self, x: Tensor, found: dict[str, Tensor], which: Tensor, gate: Tensor | None) -> Tensor:
        """What these neurons, ``which`` (n,), send down, (T, n)."""
        if gate is not None and not self.config.gated:
            return gate[:, which]
        width = self.config.ffn_width
        last = width if self.config.gated else 0
        biases = (None, None) if self.up.bias is None else (self.up.bias[which], self.up.bias[which + last])
        if not self.config.gated:
            return activate(kernels.linear(x, found["up"], biases[0]), self.config.activation)
        up = kernels.linear(x, found["up"], biases[1])
        if gate is None:
            return activate(kernels.linear(x, found["gate"], biases[0]), self.config.activation) * up
        return gate[:, which] * up


class NeuronParts(DenseParts):
    """All matrices resident but those of feed-forwards."""

    def __init__(self, config: ModelConfig, neurons: Neurons) -> None:
        super().__init__(config)
        self.neurons = neurons

    def feed_forward(self, layer: int) -> nn.Module:
        """A feed-forward over neurons."""
        return NeuronFeedForward(self.config, layer, self.neurons)

    def stateful(self) -> Sequence[Stateful]:
        """The windows of neurons remember which ones each sequence used last."""
        return (self.neurons,)
