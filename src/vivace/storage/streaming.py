"""Matrices that are read shortly before their layer runs: dense weights from flash, exactly.

Layers run in order, so which matrices come next is known. A few buffers go round: while one is computed with, the
others are filled with what follows, from the last layer on to the first of the next pass. What is computed is what
the resident model computes, on the same numbers in the same layout, so its bits are the same: in rows for PyTorch, in
tiles for native kernels (``convert.py``). This is the "hybrid" of
Alizadeh et al. 2023 (arXiv:2312.11514), with reads ahead of use; it needs no sparsity.

Adapters learn on a streamed base: what goes back through a matrix needs it again, and it is read again then.

A call that begins at another layer than expected (drafts that leave early) waits for its first matrices and goes on
from there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vivace.checkpoint.load import put
from vivace.core.config import ModelConfig
from vivace.core.cpu.low_bit import refuse_gradients
from vivace.core.cpu.packed import PackedFeedForward, PackedLinear
from vivace.core.layers import FeedForward
from vivace.core.model import Decoder
from vivace.core.parts import DenseParts
from vivace.kernels import reference as kernels
from vivace.kernels.library import LANES
from vivace.kernels.native import Matrix, NativeBody
from vivace.storage.pools import Pool, Ticket, whole
from vivace.storage.readers import aligned
from vivace.storage.store import Store


@dataclass(eq=False)
class _Buffer:
    memory: memoryview
    bytes: Tensor
    """The same memory, uint8."""
    unit: str | None = None
    ticket: Ticket | None = None
    """A read that nobody has waited for."""
    tensors: Mapping[str, Tensor] | None = None


class Stream:
    """Bundles of a store, one after the other and round again, through a few buffers."""

    def __init__(self, store: Store, pool: Pool, units: Collection[str], num_buffers: int = 2) -> None:
        """Allocate the buffers; nothing is read yet.

        Args:
            store: where the bundles lie.
            pool: reads them.
            units: names of the bundles, in the order of their use.
            num_buffers: one is computed with, the others are filled; with one, nothing is read ahead.
        """
        assert num_buffers > 0, num_buffers
        self.store = store
        self.pool = pool
        self.units = tuple(units)
        self._place = {unit: place for place, unit in enumerate(self.units)}
        size = max((store[unit].num_pages_bytes for unit in self.units), default=0)
        self._buffers = [_buffer(size) for _ in range(num_buffers)]
        self._current: _Buffer | None = None

    @property
    def num_bytes(self) -> int:
        """Of the buffers."""
        return sum(len(buffer.memory) for buffer in self._buffers)

    def weight(self, unit: str, name: str) -> Tensor:
        """A tensor of a bundle, good until one of another bundle is asked for.

        Raises:
            CheckpointError: it could not be read; whoever asks again reads again.
        """
        current = self._current
        if current is None or current.unit != unit or current.ticket is not None:
            current = self._turn_to(unit)
        assert current.tensors is not None
        return current.tensors[name]

    def _turn_to(self, unit: str) -> _Buffer:
        found = next((buffer for buffer in self._buffers if buffer.unit == unit), None)
        if found is None:
            found = self._farthest(self._place[unit])
            self._begin(found, unit)
        self._current = found
        self._read_ahead(found)
        if found.ticket is not None:
            ticket, found.ticket = found.ticket, None
            try:
                ticket.wait()
            except BaseException:
                found.unit = self._current = None
                raise
        return found

    def _farthest(self, place: int) -> _Buffer:
        """The buffer whose bundle is used last, seen from a place in the round; an empty one before all."""

        def distance(buffer: _Buffer) -> int:
            if buffer.unit is None:
                return len(self.units)
            return (self._place[buffer.unit] - place) % len(self.units)

        return max(self._buffers, key=distance)

    def _read_ahead(self, current: _Buffer) -> None:
        """Fill the other buffers with what follows."""
        assert current.unit is not None
        place = self._place[current.unit]
        wanted = [self.units[(place + ahead) % len(self.units)] for ahead in range(1, len(self._buffers))]
        have = {buffer.unit for buffer in self._buffers}
        spare = [buffer for buffer in self._buffers if buffer is not current and buffer.unit not in wanted]
        for unit in wanted:
            if unit not in have and spare:
                self._begin(spare.pop(), unit)

    def _begin(self, buffer: _Buffer, unit: str) -> None:
        if buffer.ticket is not None:  # a guess that was wrong: nobody asks how it ended
            buffer.ticket.settle()
        bundle = self.store[unit]
        buffer.unit = unit
        buffer.ticket = self.pool.submit(*whole(bundle.offset, buffer.memory[: bundle.num_pages_bytes]))
        buffer.tensors = self.store.tensors(unit, buffer.bytes)

    def close(self) -> None:
        """Wait for the reads under way."""
        for buffer in self._buffers:
            if buffer.ticket is not None:
                buffer.ticket.settle()


def _buffer(size: int) -> _Buffer:
    memory = aligned(size)
    return _Buffer(memory, torch.frombuffer(memory, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8))


class StreamedLinear(nn.Module):
    """``Linear`` whose weight is in a bundle; the bias stays in memory."""

    def __init__(self, stream: Stream, unit: str, name: str, *, bias: bool) -> None:
        super().__init__()
        self.stream = stream
        self.unit = unit
        self.name = name
        part = next(part for part in stream.store[unit].parts if part.name == name)
        self.bias = nn.Parameter(torch.empty(part.shape[0])) if bias else None

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """(T, in) -> (T, out)."""
        if torch.is_grad_enabled() and x.requires_grad:
            y: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        else:
            y = kernels.linear(x, self.stream.weight(self.unit, self.name), self.bias)
        return y if add is None else add + y


class _Product(torch.autograd.Function):
    """A product with a matrix that will not be there any more when gradients come back; it is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: StreamedLinear) -> Tensor:
        ctx.linear, ctx.dtype = linear, x.dtype
        return torch.nn.functional.linear(x, linear.stream.weight(linear.unit, linear.name), linear.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        weight = ctx.linear.stream.weight(ctx.linear.unit, ctx.linear.name)
        return (grad @ weight.to(grad.dtype)).to(ctx.dtype), None


class StreamedTiles(nn.Module):
    """``PackedLinear`` whose tiles are in a bundle; the bias stays in memory."""

    def __init__(
        self, body: NativeBody, stream: Stream, unit: str, name: str, *, bias: bool = False, half: int | None = None
    ) -> None:
        """Over a matrix, or one half of its outputs (0 or 1)."""
        super().__init__()
        self.body = body
        self.stream = stream
        self.unit = unit
        self.name = name
        tiles, pairs = next(part.shape for part in stream.store[unit].parts if part.name == name)[:2]
        self.in_width = 2 * pairs
        self._tiles = slice(tiles) if half is None else slice(half * (tiles // 2), (half + 1) * (tiles // 2))
        self.bias = nn.Parameter(torch.empty(tiles * LANES)) if bias else None

    @property
    def matrix(self) -> Matrix:
        """The weights for the body, good until those of another bundle are asked for."""
        weight = self.stream.weight(self.unit, self.name)[self._tiles]
        return Matrix(weight, self.bias, self.in_width, len(weight) * LANES)

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """(T, in) -> (T, out)."""
        refuse_gradients(x)
        return self.body.linear(self.matrix, x, add)


class StreamedParts(DenseParts):
    """Bundles of the stream are streamed, all other matrices are resident."""

    def __init__(self, config: ModelConfig, stream: Stream, body: NativeBody | None = None) -> None:
        """Choose modules.

        Args:
            config: of the model.
            stream: gives the matrices that are not resident.
            body: runs all of them, from tiles; None is PyTorch, from rows.
        """
        super().__init__(config)
        self.stream = stream
        self.body = body

    def projection(self, layer: int, site: str) -> nn.Module:
        """Fused "qkv", or "o"."""
        unit, c = f"layers.{layer}.attention", self.config
        bias = c.qkv_bias if site == "qkv" else c.output_bias
        name = f"layers.{layer}.{site}.weight"
        if self.body is not None:
            return self._tiles(self.body, unit, name, bias=bias)
        if unit not in self.stream.units:
            return super().projection(layer, site)
        return StreamedLinear(self.stream, unit, name, bias=bias)

    def feed_forward(self, layer: int) -> nn.Module:
        """A feed-forward over two matrices."""
        unit, c = f"layers.{layer}.feed_forward", self.config
        if self.body is not None:
            return self._tiled(layer, unit, self.body)
        if unit not in self.stream.units:
            return super().feed_forward(layer)
        up, down = (
            StreamedLinear(self.stream, unit, f"layers.{layer}.feed_forward.{site}.weight", bias=c.ffn_bias)
            for site in ("up", "down")
        )
        return FeedForward(c, layer, up, down)

    def _tiled(self, layer: int, unit: str, body: NativeBody) -> nn.Module:
        c = self.config
        up, down = (f"layers.{layer}.feed_forward.{site}.weight" for site in ("up", "down"))
        if not c.gated:
            wide, narrow = (self._tiles(body, unit, name, bias=c.ffn_bias) for name in (up, down))
            return FeedForward(c, layer, wide, narrow)
        gate, half = (self._tiles(body, unit, up, half=half) for half in range(2))
        return PackedFeedForward(body, c.activation, layer, gate, half, self._tiles(body, unit, down))

    def _tiles(
        self, body: NativeBody, unit: str, name: str, *, bias: bool = False, half: int | None = None
    ) -> StreamedTiles | PackedLinear:
        """A matrix of a bundle or one half of its outputs, streamed or still to be put (``put_tiles``)."""
        if unit in self.stream.units:
            return StreamedTiles(body, self.stream, unit, name, bias=bias, half=half)
        tiles, *rest = next(part.shape for part in self.stream.store[unit].parts if part.name == name)
        tiles = tiles if half is None else tiles // 2
        return PackedLinear(body, torch.empty(tiles, *rest), torch.empty(tiles * LANES) if bias else None)


def put_tiles(decoder: Decoder, name: str, tiles: Tensor) -> None:
    """Make tiles of a bundle the parameter of a decoder whose modules read tiles; gate and up stand apart there."""
    if decoder.config.gated and name.endswith(".up.weight"):
        halves = tiles.detach().chunk(2)
        put(decoder, name.removesuffix("up.weight") + "gate.weight", halves[0])
        put(decoder, name, halves[1])
    else:
        put(decoder, name, tiles)
