"""How a matrix lies in memory in each format: the one table that stores and what runs from them read.

A format that a store can hold is an entry of ``LAYOUTS``: the tensors that a matrix (out, in) consists of, how they are
made of its weights, and what native kernels multiply by once they lie in memory. Whatever reads or writes a store asks
this table, so a new format is one more entry, and a name among ``Weights`` (``low_bit.py``) if it has none yet.

All of them put sixteen outputs side by side, so some outputs of a matrix are a part of each of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from vivace.errors import ConfigError, nearest
from vivace.kernels.library import LANES
from vivace.kernels.low_bit import LowBit, Piece, Weights, pieces_of, quantise
from vivace.kernels.native import pack

LINE = 64
"""Each tensor of a matrix begins at a multiple of this many bytes, as wide loads want it."""

Laid = Tensor | LowBit
"""A matrix as native kernels take it: tiles, or codes with scales."""


@dataclass(frozen=True)
class MatrixLayout:
    """One format."""

    name: str
    pieces: Callable[[int, int], Sequence[Piece]]
    """The tensors of a matrix (out, in)."""
    lay: Callable[[Tensor], Sequence[Tensor]]
    """Makes these tensors of weights (out, in)."""
    over: Callable[[Sequence[Tensor], int], Laid]
    """Makes the matrix of these tensors, which it shares, and of its number of inputs."""

    def num_bytes(self, out_width: int, in_width: int) -> int:
        """Return the bytes of a matrix, the gaps between its tensors included."""
        return sum(_lines(prod(shape) * dtype.itemsize) for shape, dtype in self.pieces(out_width, in_width))

    def view(self, memory: Tensor, out_width: int, in_width: int) -> Laid:
        """Return the matrix that lies at the beginning of ``memory`` (bytes,) uint8, as a view of it."""
        found, first = [], 0
        for shape, dtype in self.pieces(out_width, in_width):
            stop = first + prod(shape) * dtype.itemsize
            found.append(memory[first:stop].view(dtype).view(shape))
            first += _lines(stop - first)
        return self.over(found, in_width)

    def bytes_of(self, weight: Tensor) -> Sequence[bytes | memoryview]:
        """Return the bytes of a matrix (out, in), in the order in which they lie."""
        parts: list[bytes | memoryview] = []
        for piece in self.lay(weight):
            parts.append(piece.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            parts.append(bytes(_lines(piece.nbytes) - piece.nbytes))
        return parts


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE


def _quantised(name: Weights) -> MatrixLayout:
    def lay(weight: Tensor) -> Sequence[Tensor]:
        laid = quantise(weight, name)  # type: ignore[arg-type]
        assert isinstance(laid, LowBit)
        return laid.codes, laid.scales

    def over(found: Sequence[Tensor], in_width: int) -> LowBit:
        codes, scales = found
        return LowBit(name, codes, scales, len(codes) * LANES, in_width)  # type: ignore[arg-type]

    return MatrixLayout(name, lambda out, width: pieces_of(out, width, name), lay, over)


TILES = MatrixLayout(
    "bf16",
    lambda out, width: [((out // LANES, width // 2, LANES, 2), torch.bfloat16)],
    lambda weight: [pack(weight)],
    lambda found, _: found[0],
)
LAYOUTS: Mapping[str, MatrixLayout] = {each.name: each for each in (TILES, _quantised("int8"), _quantised("q4"))}
"""By name: the formats in which the matrices of a store can lie."""


def layout_of(name: str) -> MatrixLayout:
    """Return a format by its name.

    Raises:
        ConfigError: there is none of this name; the message names the nearest.
    """
    if name not in LAYOUTS:
        raise ConfigError(f"a store holds {', '.join(LAYOUTS)}, found {name!r}{nearest(name, LAYOUTS)}")
    return LAYOUTS[name]


def some_tiles(matrix: Laid, tiles: slice) -> Laid:
    """Return some outputs of a matrix, sixteen for each tile, as a view of it."""
    if isinstance(matrix, Tensor):
        return matrix[tiles]
    codes = matrix.codes[tiles]
    per_output = matrix.scales.dim() == 1
    scales = matrix.scales.view(-1, LANES)[tiles].reshape(-1) if per_output else matrix.scales[tiles]
    return replace(matrix, codes=codes, scales=scales, out_width=len(codes) * LANES)


def num_tiles(matrix: Laid) -> int:
    """Return how many times sixteen outputs a matrix has."""
    return len(matrix if isinstance(matrix, Tensor) else matrix.codes)
