"""Matrices that are read shortly before their layer runs: dense weights from flash, exactly.

Layers run in order, so the matrices that come next are known. A few buffers take turns: while one is computed with, the
others are filled with what follows, from the last layer on to the first of the next pass. The numbers and their layout
are those of the resident model, so the results have the same bits: in rows for PyTorch, in tiles for native kernels
(``convert.py``). This is the "hybrid" of Alizadeh et al. 2023 (arXiv:2312.11514), with reads ahead of use; it needs no
sparsity.

A call that begins at another layer than the one read ahead (early exits of drafts) reads its first matrices at once,
before what was read ahead, and continues from there. Adapters can be trained on a streamed base: the backward pass
reads each matrix again.
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
from vivace.errors import CheckpointError
from vivace.kernels import reference as kernels
from vivace.kernels.layouts import Laid, num_tiles, some_tiles
from vivace.kernels.library import LANES
from vivace.kernels.low_bit import LowBit
from vivace.kernels.native import Matrix, NativeBody
from vivace.storage.io.async_reader import AsyncReader, PendingRead
from vivace.storage.io.readers import aligned
from vivace.storage.store import Store

NOW, AHEAD = 0, 1
"""Urgency of a read that a layer waits for, and of one that is ahead of use."""


@dataclass(eq=False)
class _Buffer:
    memory: memoryview
    bytes: Tensor
    """The same memory as a tensor, uint8."""
    unit: str | None = None
    """The bundle that is in the buffer, or being read into it."""
    read: PendingRead | None = None
    """The read that fills the buffer, until somebody has waited for it."""
    tensors: Mapping[str, Laid] | None = None


class Stream:
    """Bundles of a store in the order of their use, again and again, through a few buffers."""

    def __init__(self, store: Store, reader: AsyncReader, units: Collection[str], num_buffers: int = 2) -> None:
        """Allocate the buffers; nothing is read yet.

        Args:
            store: where the bundles lie.
            reader: reads its file.
            units: names of the bundles, in the order of their use.
            num_buffers: one is computed with, the others are filled; with one, nothing is read ahead.
        """
        assert num_buffers > 0, num_buffers
        self.store = store
        self.reader = reader
        self.units = tuple(units)
        self._place = {unit: place for place, unit in enumerate(self.units)}
        size = max((store[unit].num_pages_bytes for unit in self.units), default=0)
        self._buffers = [_buffer(size) for _ in range(num_buffers)]
        self._current: _Buffer | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(len(buffer.memory) for buffer in self._buffers)

    def weight(self, unit: str, name: str) -> Tensor:
        """Return a tensor of a bundle of plain numbers; it is valid as long as a matrix (see ``laid``)."""
        found = self.laid(unit, name)
        assert isinstance(found, Tensor)
        return found

    def laid(self, unit: str, name: str) -> Laid:
        """Return a matrix of a bundle as it lies there; it is valid until one of another bundle is asked for.

        Raises:
            CheckpointError: it could not be read; the next call reads it again.
        """
        current = self._current
        if current is None or current.unit != unit or current.read is not None:
            current = self._turn_to(unit)
        assert current.tensors is not None
        return current.tensors[name]

    def _turn_to(self, unit: str) -> _Buffer:
        found = next((buffer for buffer in self._buffers if buffer.unit == unit), None)
        is_ahead = found is not None
        self._current = None
        if found is None:
            found = self._farthest(self._place[unit])
            self._begin(found, unit, NOW)
        self._read_ahead(found)
        try:
            self._finish(found, unit, is_ahead=is_ahead)
        except BaseException:
            found.unit = None
            raise
        self._current = found
        return found

    def _finish(self, buffer: _Buffer, unit: str, *, is_ahead: bool) -> None:
        """Wait until a buffer is filled, and fill it again if that failed ahead: the fault may be over by now."""
        if buffer.read is None:
            return
        try:
            buffer.read.wait()
        except CheckpointError:
            if not is_ahead:
                raise
            self._begin(buffer, unit, NOW)
            self._finish(buffer, unit, is_ahead=False)
        buffer.read = None  # not before it is over: whoever fills the buffer next waits for it

    def _farthest(self, place: int) -> _Buffer:
        """Return the buffer whose bundle is used last, counted from ``place``; an empty buffer comes before all."""

        def distance(buffer: _Buffer) -> int:
            if buffer.unit is None:
                return len(self.units)
            return (self._place[buffer.unit] - place) % len(self.units)

        return max(self._buffers, key=distance)

    def _read_ahead(self, current: _Buffer) -> None:
        """Begin to fill the other buffers with the bundles that follow."""
        assert current.unit is not None
        place = self._place[current.unit]
        wanted = [self.units[(place + ahead) % len(self.units)] for ahead in range(1, len(self._buffers))]
        have = {buffer.unit for buffer in self._buffers}
        spare = [buffer for buffer in self._buffers if buffer is not current and buffer.unit not in wanted]
        for unit in wanted:
            if unit not in have and spare:
                self._begin(spare.pop(), unit, AHEAD)

    def _begin(self, buffer: _Buffer, unit: str, due: int) -> None:
        if buffer.read is not None:  # it was read ahead in vain: its error, if any, concerns nobody
            buffer.read.join()
        bundle = self.store[unit]
        buffer.unit = None  # what is cut here leaves an empty buffer
        buffer.read = self.reader.submit_whole(buffer.memory[: bundle.num_pages_bytes], bundle.offset, due)
        buffer.tensors = self.store.tensors(unit, buffer.bytes)
        buffer.unit = unit

    def close(self) -> None:
        """Wait until no read is under way."""
        for buffer in self._buffers:
            if buffer.read is not None:
                buffer.read.join()


def _buffer(size: int) -> _Buffer:
    memory = aligned(size)
    return _Buffer(memory, torch.frombuffer(memory, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8))


class StreamedLinear(nn.Module):
    """A ``Linear`` whose weight is in a streamed bundle; its bias stays in memory."""

    def __init__(self, stream: Stream, unit: str, name: str, *, bias: bool) -> None:
        super().__init__()
        self.stream = stream
        self.unit = unit
        self.name = name
        part = next(part for part in stream.store[unit].parts if part.name == name)
        self.bias = nn.Parameter(torch.empty(part.shape[0])) if bias else None

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Compute the projection, (T, in) -> (T, out)."""
        if torch.is_grad_enabled() and x.requires_grad:
            y: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        else:
            y = kernels.linear(x, self.stream.weight(self.unit, self.name), self.bias)
        return y if add is None else add + y


class _Product(torch.autograd.Function):
    """The product with a frozen matrix that has left its buffer when gradients come back, and is read again then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: StreamedLinear) -> Tensor:
        ctx.linear, ctx.dtype = linear, x.dtype
        return torch.nn.functional.linear(x, linear.stream.weight(linear.unit, linear.name), linear.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        weight = ctx.linear.stream.weight(ctx.linear.unit, ctx.linear.name)
        return (grad @ weight.to(grad.dtype)).to(ctx.dtype), None


class StreamedTiles(nn.Module):
    """A ``PackedLinear`` whose tiles are in a streamed bundle; its bias stays in memory."""

    def __init__(
        self, body: NativeBody, stream: Stream, unit: str, name: str, *, bias: bool = False, half: int | None = None
    ) -> None:
        """Find the matrix in its bundle; ``half`` (0 or 1) takes that half of its outputs."""
        super().__init__()
        self.body = body
        self.stream = stream
        self.unit = unit
        self.name = name
        part = next(part for part in stream.store[unit].parts if part.name == name)
        tiles, self.in_width = part.num_tiles, part.in_width
        self._tiles = slice(tiles) if half is None else slice(half * (tiles // 2), (half + 1) * (tiles // 2))
        self.bias = nn.Parameter(torch.empty(tiles * LANES)) if bias else None

    @property
    def matrix(self) -> Matrix:
        """The weights for native kernels, valid until those of another bundle are asked for."""
        weight = some_tiles(self.stream.laid(self.unit, self.name), self._tiles)
        return Matrix(weight, self.bias, self.in_width, num_tiles(weight) * LANES)

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Compute the projection, (T, in) -> (T, out)."""
        refuse_gradients(x)
        return self.body.linear(self.matrix, x, add)


class HeldTiles(nn.Module):
    """A projection whose quantized matrix stays in memory as it lies in the store; ``put_tiles`` fills it."""

    weight: LowBit | None = None

    def __init__(self, body: NativeBody, bias: Tensor | None) -> None:
        super().__init__()
        self.body = body
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def matrix(self) -> Matrix:
        """The weights for native kernels."""
        assert self.weight is not None, "filled when the model is loaded"
        return Matrix(self.weight, self.bias, self.weight.in_width, self.weight.out_width)

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Compute the projection, (T, in) -> (T, out)."""
        refuse_gradients(x)
        return self.body.linear(self.matrix, x, add)


class StreamedParts(DenseParts):
    """Builds layers whose matrices are streamed if their bundle is, and resident otherwise."""

    def __init__(self, config: ModelConfig, stream: Stream, body: NativeBody | None = None) -> None:
        """Set what the modules read from and run on.

        Args:
            config: the model.
            stream: of the bundles that are not resident.
            body: native kernels that run all matrices, from tiles; None is PyTorch, from rows.
        """
        super().__init__(config)
        self.stream = stream
        self.body = body

    def projection(self, layer: int, site: str) -> nn.Module:
        """Return the fused projection "qkv", or "o"."""
        unit, c = f"layers.{layer}.attention", self.config
        bias = c.qkv_bias if site == "qkv" else c.output_bias
        name = f"layers.{layer}.{site}.weight"
        if self.body is not None:
            return self._tiles(self.body, unit, name, bias=bias)
        if unit not in self.stream.units:
            return super().projection(layer, site)
        return StreamedLinear(self.stream, unit, name, bias=bias)

    def feed_forward(self, layer: int) -> nn.Module:
        """Return a feed-forward over the matrices of a layer."""
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
            return PackedFeedForward(body, c.activation, layer, None, wide, narrow)
        gate, half = (self._tiles(body, unit, up, half=half) for half in range(2))
        return PackedFeedForward(body, c.activation, layer, gate, half, self._tiles(body, unit, down))

    def _tiles(
        self, body: NativeBody, unit: str, name: str, *, bias: bool = False, half: int | None = None
    ) -> StreamedTiles | PackedLinear | HeldTiles:
        """Return a matrix or one half of its outputs, streamed, or resident and still to be filled (``put_tiles``)."""
        if unit in self.stream.units:
            return StreamedTiles(body, self.stream, unit, name, bias=bias, half=half)
        part = next(part for part in self.stream.store[unit].parts if part.name == name)
        tiles, rest = part.num_tiles if half is None else part.num_tiles // 2, part.shape[1:]
        if part.weights:
            return HeldTiles(body, torch.empty(tiles * LANES) if bias else None)
        return PackedLinear(body, torch.empty(tiles, *rest), torch.empty(tiles * LANES) if bias else None)


def put_tiles(decoder: Decoder, name: str, tiles: Laid) -> None:
    """Make tiles of a bundle a parameter of a decoder whose modules read tiles, where gate and up are two matrices."""
    if decoder.config.gated and name.endswith(".up.weight"):
        count = num_tiles(tiles) // 2
        _put_matrix(decoder, name.removesuffix("up.weight") + "gate.weight", some_tiles(tiles, slice(count)))
        _put_matrix(decoder, name, some_tiles(tiles, slice(count, None)))
    else:
        _put_matrix(decoder, name, tiles)


def _put_matrix(decoder: Decoder, name: str, matrix: Laid) -> None:
    if isinstance(matrix, Tensor):
        put(decoder, name, matrix.detach())
        return
    held = decoder.get_submodule(name.removesuffix(".weight"))
    assert isinstance(held, HeldTiles), name
    held.weight = matrix
