"""Recorded work: which graphs there are, when one is recorded, and what launches it again.

What is recorded reads and writes the same memory whenever it is launched. So the arguments of a call are copied into
tensors that stay, and the results stand in tensors that the next launch overwrites.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vivace.kernels.fused import on_device

if TYPE_CHECKING:
    from vivace.core.model import Decoder

Results = tuple[Tensor, ...]
Record = Callable[[Callable[[], Results]], tuple[Callable[[], None], Results]]
"""Records the work of a function; returns what launches it again, and the tensors in which its results then stand."""

MOST_GRAPHS = 64
"""Graphs that are kept; the one that was not used for longest goes first."""

MOST_SHAPES = 4096
"""Shapes whose uses are counted before the count begins anew."""

USES_BEFORE = 2
"""Times that a shape runs kernel by kernel before it is recorded, which takes as long as many passes."""


_CAPTURING = threading.Lock()
"""Held while anything is recorded: a GPU's allocator knows one recording at a time."""


def cuda_graph(work: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
    """Record work on the current GPU as a CUDA graph.

    It runs twice before, on the stream that is recorded, since libraries choose their kernels and take their memory
    then. Nothing is collected meanwhile: what a finalizer does to the GPU's memory would be recorded, too.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with _CAPTURING:
            stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(2):
                    work()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                results = work()
    finally:
        if was_enabled:
            gc.enable()
    return graph.replay, results


@dataclass(frozen=True)
class Graph:
    """Recorded work: where its arguments and its results are, and what launches it."""

    arguments: tuple[Tensor, ...]
    results: Results
    launch: Callable[[], None]
    kept: object
    """What the graph reads besides its arguments, and must stay where it is."""

    def given(self, values: Sequence[Tensor]) -> Results:
        """Launch it with these arguments, and return its results, which the next launch overwrites."""
        for place, value in zip(self.arguments, values, strict=True):
            if place is not value:
                place.copy_(value)
        with on_device(self.results[0].device):
            self.launch()
        return self.results


class Recordings:
    """The graphs of one decoder, by what must be equal for two calls to be launches of one graph."""

    def __init__(self, record: Record, decoder: Decoder) -> None:
        """Record with ``record`` what a decoder computes."""
        self._record = record
        self._decoder = decoder
        self._graphs: OrderedDict[tuple[object, ...], Graph] = OrderedDict()
        self._uses: Counter[tuple[object, ...]] = Counter()
        self._places: tuple[int, ...] = ()
        """Where the decoder's weights and the blocks of keys and values lay when the graphs were recorded."""
        self._owners: set[int] = set()
        """Identities in shapes whose objects are watched (``end_with``)."""
        self.lock = threading.Lock()
        """Held from the launch of a graph until its results have been copied."""

    def __len__(self) -> int:
        """Return the number of graphs that are kept."""
        return len(self._graphs)

    @property
    def shapes(self) -> tuple[tuple[object, ...], ...]:
        """Return the shapes of which there are graphs."""
        return tuple(self._graphs)

    def find(self, shape: tuple[object, ...]) -> Graph | None:
        """Return the graph of a shape, if there is one; all are dropped once weights or blocks lie elsewhere."""
        store = self._decoder.blocks
        blocks = (part for layer in range(len(store.specs)) for part in store.stored(layer))
        places = (
            id(store),
            self._decoder.embedding.data_ptr(),
            *(number for part in blocks for number in (part.data_ptr(), part.shape[1])),
        )
        if places != self._places:
            self._graphs.clear()
            self._places = places
        graph = self._graphs.get(shape)
        if graph is not None:
            self._graphs.move_to_end(shape)
        return graph

    def end_with(self, *owners: object) -> None:
        """Drop graphs with the objects whose identity is in their shape, and whose weights they read."""
        for owner in owners:
            if id(owner) not in self._owners:
                self._owners.add(id(owner))
                weakref.finalize(owner, self._drop, id(owner))

    def _drop(self, owner: int) -> None:
        self._owners.discard(owner)
        for shape in [shape for shape in self._graphs if owner in shape]:
            del self._graphs[shape]

    def is_due(self, shape: tuple[object, ...]) -> bool:
        """Count a use of a shape without a graph, and return whether it was used often enough to be recorded."""
        if self._uses[shape] >= USES_BEFORE:
            return True
        if len(self._uses) > MOST_SHAPES:
            self._uses.clear()
        self._uses[shape] += 1
        return False

    def add(
        self,
        shape: tuple[object, ...],
        values: Sequence[Tensor],
        work: Callable[[Sequence[Tensor]], Results],
        kept: Callable[[], object] = lambda: None,
    ) -> Graph:
        """Record work over copies of these arguments; ``kept`` returns what it reads besides, once it is recorded."""
        arguments = tuple(value.clone() for value in values)
        with on_device(arguments[0].device):
            launch, results = self._record(lambda: work(arguments))
        graph = Graph(arguments, results, launch, kept())
        self._graphs[shape] = graph
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return graph
