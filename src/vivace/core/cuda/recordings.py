"""Recorded work: which graphs there are, when one is recorded, and what launches it again.

What is recorded reads and writes the same memory whenever it is launched. So the arguments of a call are copied into
tensors that stay, and the results stand in tensors that the next launch overwrites.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vivace.core.blocks import BlockStore

Results = tuple[Tensor, ...]
Record = Callable[[Callable[[], Results]], tuple[Callable[[], None], Results]]
"""Records the work of a function; returns what launches it again, and the tensors in which its results then stand."""

MOST_GRAPHS = 64
"""Graphs that are kept; the one that was not used for longest goes first."""

MOST_SHAPES = 4096
"""Shapes whose uses are counted before the count begins anew."""

USES_BEFORE = 2
"""Times that a shape runs kernel by kernel before it is recorded, which takes as long as many passes."""


def cuda_graph(work: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
    """Record work on the current GPU as a CUDA graph.

    It runs twice before, on a stream of its own, since libraries choose their kernels and take their memory then.
    """
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = work()
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
        self.launch()
        return self.results


class Recordings:
    """The graphs of one decoder, by what must be equal for two calls to be launches of one graph."""

    def __init__(self, record: Record, blocks: Callable[[], BlockStore]) -> None:
        """Record with ``record`` what reads and writes keys and values of ``blocks``."""
        self._record = record
        self._blocks = blocks
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()
        self._uses: Counter[Hashable] = Counter()
        self._places: tuple[int, ...] = ()
        """Where the blocks of keys and values lay when the graphs were recorded."""
        self.lock = threading.Lock()
        """Held from the launch of a graph until its results have been copied."""

    def __len__(self) -> int:
        """Return the number of graphs that are kept."""
        return len(self._graphs)

    def find(self, shape: Hashable) -> Graph | None:
        """Return the graph of a shape, if there is one; all are dropped once the blocks lie elsewhere."""
        store = self._blocks()
        places = tuple(part.data_ptr() for layer in range(len(store.specs)) for part in store.stored(layer))
        if places != self._places:
            self._graphs.clear()
            self._places = places
        graph = self._graphs.get(shape)
        if graph is not None:
            self._graphs.move_to_end(shape)
        return graph

    def is_due(self, shape: Hashable) -> bool:
        """Count a use of a shape without a graph, and return whether it was used often enough to be recorded."""
        if self._uses[shape] >= USES_BEFORE:
            return True
        if len(self._uses) > MOST_SHAPES:
            self._uses.clear()
        self._uses[shape] += 1
        return False

    def add(
        self,
        shape: Hashable,
        values: Sequence[Tensor],
        work: Callable[[Sequence[Tensor]], Results],
        kept: object = None,
    ) -> Graph:
        """Record work over copies of these arguments."""
        arguments = tuple(value.clone() for value in values)
        launch, results = self._record(lambda: work(arguments))
        graph = Graph(arguments, results, launch, kept)
        self._graphs[shape] = graph
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return graph
