"""Layers as recorded graphs: the kernels of a pass are recorded once for each shape, and launched together afterwards.

What is recorded reads and writes the same memory whenever it is launched. So the arguments of a call (residuals, where
entries are stored and read, masks, rotations) are copied into tensors that stay, and the layers run as they are, over a
``Step`` made of those tensors. Shapes are rounded up, so that a text of any length needs few of them: further rows
repeat the last one and store what it stores, further entries are masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.cuda.recordings import Graph, Recordings, Results
from vivace.core.layers import FeedForward
from vivace.core.step import Step
from vivace.kernels.reference import KEY_BLOCK

if TYPE_CHECKING:
    from vivace.core.model import Decoder, Layer
    from vivace.kernels.low_bit import Weights

MOST_ROWS = 64
"""Rows of a pass up to which it is recorded: launching takes less than computing for more."""


def can_record(decoder: Decoder) -> bool:
    """Return whether the layers of a decoder never wait for the processor, as a mixture does to choose its experts, and
    read nothing but the text: how long a source is, is a number of Python.
    """
    has_experts = any(not isinstance(layer.feed_forward, FeedForward) for layer in decoder.layers)
    return not has_experts and not decoder.stateful and decoder.config.encoder is None


class Shape(NamedTuple):
    """What must be equal for two calls to be launches of one graph."""

    rows: int
    writing: int
    fed: int
    addressed: int
    """Rows for which it is said where entries are: one where all rows read the same entries, else all."""
    entries: int
    """Entries that a row reads, visible or masked."""
    start: int
    stop: int
    deltas: tuple[tuple[int, tuple[int, ...]], ...]
    """The weights of low-rank deltas, and which row carries them."""


class GraphSpan:
    """Runs neighbouring layers of a decoder as recorded graphs, with the sums of the layers one by one."""

    is_native = False
    """Layers are PyTorch's."""

    def __init__(self, decoder: Decoder, recordings: Recordings) -> None:
        """Run the layers of a decoder as graphs that are kept among its recordings."""
        self._decoder = decoder
        self._layers: Sequence[Layer] = list(decoder.layers)  # type: ignore[arg-type]
        self.recordings = recordings
        self._memory: KVCache | None = None
        rotaries = {id(layer.rotary): layer for layer in self._layers if layer.rotary is not None}
        self._rotating = list(rotaries.values())
        """One layer for each rotary embedding."""
        self._windows = sorted({layer.attention.window for layer in self._layers}, key=lambda window: window or 0)

    def covers(self, step: Step) -> bool:
        """Return whether a call is of few single rows over the blocks of the decoder's texts."""
        memory = step.memory
        return (
            step.grid is None
            and step.chunk is None
            and step.index is None
            and isinstance(memory, KVCache)
            and memory.store is self._decoder.blocks
            and not memory.has_pruned
            and step.num_rows <= MOST_ROWS
        )

    def quantized(self, start: int, stop: int, weights: Weights) -> GraphSpan:
        """Return the span itself: drafts on a GPU are made with the weights as they are."""
        return self

    def run(self, h: Tensor, step: Step, start: int, stop: int) -> Tensor:
        """Run rows (T, E) through layers start..stop-1."""
        if stop - start < 2:
            return self._one_by_one(h, step, start, stop)
        with self.recordings.lock:
            shape = self._shape(step, start, stop)
            graph = self.recordings.find(shape)
            if graph is None and not self.recordings.is_due(shape):
                return self._one_by_one(h, step, start, stop)
            given = self._arguments(h, step, shape)
            if graph is None:
                graph = self._recorded(given, step, shape)
            [rows] = graph.given(given)
            return rows[: len(h)].clone()

    def _one_by_one(self, h: Tensor, step: Step, start: int, stop: int) -> Tensor:
        for layer in self._layers[start:stop]:
            h = layer(h, step)
        return h

    def _shape(self, step: Step, start: int, stop: int) -> Shape:
        """Return the shape of a call. Rows are rounded up where every row stores something and none carries deltas."""
        rows = step.num_rows
        alike = rows == step.num_write == step.num_feed and not step.low_rank
        count = 1 << (rows - 1).bit_length() if alike else rows
        blocks = step.num_visible // KEY_BLOCK
        entries = (1 << (blocks - 1).bit_length()) * KEY_BLOCK
        shares = step.single_slot is not None and step.order is None
        deltas = tuple((id(each.down), tuple(each.carriers)) for each in step.low_rank)
        return Shape(
            count,
            count if alike else step.num_write,
            count if alike else step.num_feed,
            1 if shares else count,
            entries,
            start,
            stop,
            deltas,
        )

    def _arguments(self, h: Tensor, step: Step, shape: Shape) -> list[Tensor]:
        """Return what a graph of this shape reads, in the order in which ``_recorded`` takes it."""
        assert isinstance(step.memory, KVCache)
        values = [_longer(h, shape.rows)]
        for pool in range(len(step.memory.store.pools)):
            values.append(_longer(step.written(pool), shape.writing))
            read = step.read(pool)[: shape.addressed] if shape.addressed == 1 else _longer(step.read(pool), shape.rows)
            values.append(F.pad(read, (0, shape.entries - read.shape[1])))
        for window in self._windows:
            mask = step.visible(window, h.dtype)
            values.append(F.pad(_longer(mask, shape.rows), (0, shape.entries - mask.shape[1]), value=-torch.inf))
        for layer in self._rotating:
            values += (_longer(part, shape.rows) for part in layer.rotation(step, h.dtype))
        return values

    def _recorded(self, given: Sequence[Tensor], step: Step, shape: Shape) -> Graph:
        """Record the layers over copies of these arguments."""

        def work(arguments: Sequence[Tensor]) -> Results:
            h, *rest = arguments
            return (self._one_by_one(h, self._step_of(rest, step, shape), shape.start, shape.stop),)

        return self.recordings.add(shape, given, work, kept=lambda: step.low_rank)

    def _step_of(self, arguments: Sequence[Tensor], step: Step, shape: Shape) -> Step:
        """Return the call that the layers see while they are recorded: everything that they derive is given."""
        memory = self._own_memory(step)
        left = iter(arguments)
        pools = range(len(memory.store.pools))
        addresses = {(kind, pool): next(left) for pool in pools for kind in ("written", "read")}
        masks = {(window, self._decoder.dtype): next(left) for window in self._windows}
        rotations = {(id(layer.rotary), self._decoder.dtype): (next(left), next(left)) for layer in self._rotating}
        own = replace(
            step,
            memory=memory,
            tail=None,
            num_write=shape.writing,
            num_feed=shape.fed,
            slot=_longer(step.slot, shape.rows),
        )
        vars(own).update(
            _addresses=addresses,
            _masks=masks,
            rotations=rotations,
            order=None,
            single_slot=None,
            num_visible=shape.entries,
            low_rank=step.low_rank,
        )
        return own

    def _own_memory(self, step: Step) -> KVCache:
        """Return a cache over the blocks of the decoder's texts that has no texts itself."""
        assert isinstance(step.memory, KVCache)
        if self._memory is None or self._memory.store is not step.memory.store:
            self._memory = self._decoder.new_cache(1, 1)
        return self._memory


def _longer(rows: Tensor, count: int) -> Tensor:
    """Return rows (n, ...) with the last one repeated up to ``count``."""
    missing = count - len(rows)
    return torch.cat((rows, rows[-1:].expand(missing, *rows.shape[1:]))) if missing else rows
