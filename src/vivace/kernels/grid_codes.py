"""A file's codes in the layout of the native kernels: four or eight bits a code (``grid4``, ``grid8``).

No code and no scale of the file is rounded. Codes of up to four bits stay four bits, if a table of sixteen integers
holds all that occur in the matrix; others take eight. Scales and offsets are kept as an int8 multiple of a float16 for
each 256 inputs where the file has them so (the K-quants of llama.cpp), as float16 where that holds them all exactly,
and as float32 otherwise. Groups have 16, 32 or 64 inputs; larger ones repeat their scale.

Inputs are quantized to integers -127..127 with a scale for each 16, where ``int8`` and ``q4`` have one for each 64:
here that rounding is all that is lost, and a large input costs precision in its own 16 only. Products of 16 inputs are
summed exactly; the sums are scaled and added in order, first within the inputs that share a scale of the weights,
whose scaled sum is multiplied with zero and offset. ``GridCodes.products`` computes that in PyTorch, to the bits of
the native kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.kernels.grid import WIDE, Grid, stacked
from vivace.kernels.library import GROUP, LANES

INPUTS = 16
"""Number of neighbouring inputs that share a scale of theirs."""
HEADER = 128
"""Bytes before the numbers of groups (``GridSide`` in ``native/abi.h``)."""
KINDS = {"nothing": 0, "halves": 1, "floats": 2, "multiples": 3}
"""How a number of each group is stored (``Factor`` in ``native/abi.h``)."""
GROUPS = (16, 32, 64)
"""Sizes of groups that kernels multiply."""
ROWS = 1024
"""Outputs that are laid out at a time, which bounds the memory of wider copies."""
LINE = 64
"""Bytes of a line of the cache, at which each part begins."""

TABLES = (
    tuple(range(-8, 8)),
    tuple(range(16)),
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
)
"""What codes of four bits may stand for: symmetric, from zero on, and the integers of IQ4_NL, each rising."""


@dataclass(frozen=True, eq=False)
class GridCodes:
    """A matrix of a file's codes, in the layout of the native kernels."""

    format: Literal["grid4", "grid8"]
    codes: Tensor
    """uint8. grid4: (tiles, groups, 8, 16, 4), two codes a byte. grid8: (tiles, groups, 16, 16, 4), codes plus 128."""
    scales: Tensor
    """uint8: a ``GridSide`` with all that it points to."""
    numbers: Mapping[str, Tensor]
    """Views of ``scales``: "scales", "offsets" and "zeros" (tiles, groups, parts, 16), "scale_units" and
    "offset_units" (tiles, inputs / 256, 16), "table" (16,), "order" (in,); those that there are."""
    out_width: int
    in_width: int

    @property
    def nbytes(self) -> int:
        """Bytes of codes and of what lies beside them."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def order(self) -> Tensor | None:
        """Which input comes at each place, (in,); None where they are in order."""
        return self.numbers["order"].long() if "order" in self.numbers else None

    def integers(self, tiles: Tensor | slice = slice(None)) -> Tensor:
        """Return what the codes of some tiles stand for before zeros and scales, (n * 16, groups * 64) int16."""
        codes = self.codes[tiles]
        if self.format == "grid8":
            plain = (codes.short() - 128).permute(0, 3, 1, 2, 4)
        else:
            both = torch.stack((codes & 15, codes >> 4), 3)  # (n, groups, 8, 2, 16, 4)
            plain = self.numbers["table"].short()[both.int()].permute(0, 4, 1, 2, 3, 5)
        return plain.reshape(len(codes) * LANES, codes.shape[1] * GROUP)

    def factors(self, name: str, tiles: Tensor | slice = slice(None)) -> Tensor | None:
        """Return "scales", "offsets" or "zeros" of some tiles, (n * 16, groups * parts) float32; None for none."""
        if name not in self.numbers:
            return None
        values = self.numbers[name][tiles].float()
        units = self.numbers.get(f"{name.removesuffix('s')}_units")
        if units is not None:
            wide = units[tiles].float().repeat_interleave(WIDE // GROUP, 1)[:, : values.shape[1]]
            values = wide[:, :, None] * values
        return values.permute(0, 3, 1, 2).reshape(len(values) * LANES, -1)

    def _weights(self, tiles: Tensor | slice) -> Tensor:
        """Return the weights of some tiles, (n * 16, in) float32."""
        scales, zeros, offsets = (self.factors(name, tiles) for name in ("scales", "zeros", "offsets"))
        assert scales is not None
        codes = self.integers(tiles).view(*scales.shape, -1).float()
        if zeros is not None:
            codes = codes - zeros[:, :, None]
        values = codes * scales[:, :, None]
        if offsets is not None:
            values = values + offsets[:, :, None]
        found = values.flatten(1)[:, : self.in_width]
        return found if self.order is None else torch.empty_like(found).index_copy_(1, self.order, found)

    def dense(self) -> Tensor:
        """Return the weights, (out, in) float32."""
        return self._weights(slice(None))[: self.out_width]

    def rows(self, index: Tensor) -> Tensor:
        """Return some rows of ``dense``, (n,) -> (n, in) float32."""
        each = torch.arange(len(index)) * LANES + index % LANES
        return self._weights(index // LANES)[each]

    def products(self, whole: Tensor, scales: Tensor) -> Tensor:
        """Return ``x W^T`` in float32, (T, out).

        Args:
            whole: (T, n, 16) integers of x, in the order of the codes, as float32; n = groups * 4.
            scales: (T, n) their scales.
        """
        own, zeros, offsets = (self.factors(name) for name in ("scales", "zeros", "offsets"))
        assert own is not None
        quarters = whole.shape[1] // own.shape[1]
        integers = self.integers().view(len(own), whole.shape[1], INPUTS).float()
        total = torch.zeros(len(whole), len(own))

        def add(to: Tensor, values: Tensor, factors: Tensor) -> Tensor:
            return (to.double() + values.double() * factors.double()).float()

        for part in range(own.shape[1]):
            some, inputs = torch.zeros_like(total), torch.zeros(len(whole), 1)
            for place in range(part * quarters, (part + 1) * quarters):
                scale = scales[:, place, None]
                some = add(some, whole[:, place] @ integers[:, place].t(), scale)
                inputs = inputs + scale * whole[:, place].sum(1, keepdim=True)
            total = add(total, some, own[:, part])
            if zeros is not None:
                total = add(total, own[:, part] * zeros[:, part], -inputs)
            if offsets is not None:
                total = add(total, offsets[:, part], inputs)
        return total[:, : self.out_width]


@dataclass(frozen=True, eq=False)
class GridRows:
    """A grid that these kernels have a place for, before it is laid out (``Coded``)."""

    grid: Grid

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and of inputs."""
        return self.grid.shape

    @property
    def kind(self) -> str:
        """Name of the number format."""
        return "grid"

    def rows(self, start: int, stop: int) -> GridRows:
        """Return outputs ``start`` .. ``stop - 1``."""
        return GridRows(self.grid.rows(start, stop))

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights (out, in), each rounded once."""
        return self.grid.dense(dtype)

    def packed(self) -> GridCodes:
        """Lay the codes out for the kernels; nothing is rounded."""
        found = grid_codes(self.grid)
        assert found is not None, "part of a matrix that has a place has one too"
        return found


def grid_rows(grids: Sequence[Grid]) -> GridRows | None:
    """Return grids of the same inputs as one, their outputs below each other; None where the kernels have no place."""
    whole = stacked(grids)
    return GridRows(whole) if whole is not None and _fits(whole) else None


def _group_of(grid: Grid) -> int:
    """Return the number of inputs that share a scale in the layout, 0 where there is no place for such groups."""
    if grid.group >= grid.shape[1] or grid.group % GROUP == 0:
        return GROUP
    return next((size for size in reversed(GROUPS) if grid.group % size == 0), 0)


def _fits(grid: Grid) -> bool:
    """Return whether the layout has a place for a grid, and for every part of it."""
    low, high = (int(found) for found in grid.codes.aminmax())
    zeros = grid.zeros
    least, most = (0, 0) if zeros is None else (int(zeros.min()), int(zeros.max()))
    is_signed = low >= -128 and high <= 127 and least >= -128 and most <= 127
    is_unsigned = low >= 0 and high <= 255 and least >= 0 and most <= 255
    return _group_of(grid) > 0 and (is_signed or is_unsigned)


def grid_codes(grid: Grid) -> GridCodes | None:
    """Lay out a matrix of codes; None where these kernels have no place for it.

    That is so where the size of its groups has no common measure with 16 inputs, where codes take more than eight bits,
    or where a zero is beyond an int8.
    """
    out_width, in_width = grid.shape
    group = _group_of(grid)
    if not _fits(grid):
        return None
    shift, low, high, zeros = _shift(grid)
    raw = (grid.codes if grid.codes.itemsize == 1 else (grid.codes + shift).to(torch.int8)).view(torch.uint8)
    shift = shift if grid.codes.itemsize == 1 else 0
    table = _table(raw, shift, low, high)
    places = torch.arange(-128, 128) if table is None else table
    place_of = torch.zeros(256, dtype=torch.uint8)
    place_of[(places.int() - shift) % 256] = torch.arange(len(places), dtype=torch.uint8)
    is_even = len(places) - 1 == int(places[-1]) - int(places[0])
    tiles, groups = -(-out_width // LANES), -(-in_width // GROUP)
    parts = GROUP // group
    codes = torch.empty(tiles, groups, 16 if table is None else 8, LANES, 4, dtype=torch.uint8)
    for first in range(0, out_width, ROWS):
        some = raw[first : first + ROWS]
        chosen = some + (shift - int(places[0])) % 256 if is_even else place_of[some.int()]
        padded = F.pad(chosen, (0, -in_width % GROUP, 0, -len(some) % LANES))
        place = slice(first // LANES, first // LANES + len(padded) // LANES)
        if table is None:
            codes[place] = _tile(padded, 16)
        else:
            pairs = _tile(padded, 8, 2)
            codes[place] = pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4

    def laid(values: Tensor) -> Tensor:
        """Numbers of the file's groups as numbers of ours, (out, n) -> (tiles, groups, parts, 16)."""
        fine = values.repeat_interleave(groups * parts if grid.group >= in_width else grid.group // group, 1)
        short = groups * parts - fine.shape[1]
        padded = F.pad(fine[:, : groups * parts], (0, max(0, short), 0, -out_width % LANES))
        return padded.view(tiles, LANES, groups, parts).permute(0, 2, 3, 1).contiguous()

    arrays: dict[str, Tensor] = {}
    kinds = {"offsets": "nothing"}
    for name, values, units in (("scales", grid.scales, grid.units), ("offsets", grid.offsets, grid.offset_units)):
        if values is None:
            continue
        kinds[name], found, unit = _stored(values, units, grid.group)
        arrays[name] = laid(found)
        if unit is not None:
            padded = F.pad(unit, (0, -(-groups * GROUP // WIDE) - unit.shape[1], 0, -out_width % LANES))
            arrays[f"{name[:-1]}_units"] = padded.view(tiles, LANES, -1).transpose(1, 2).contiguous()
    if zeros is not None:
        arrays["zeros"] = laid(zeros.to(torch.int8))
    if grid.order is not None:
        arrays["order"] = grid.order.int()
    side, numbers = _side(group, kinds, table, arrays)
    return GridCodes("grid8" if table is None else "grid4", codes, side, numbers, out_width, in_width)


def _shift(grid: Grid) -> tuple[int, int, int, Tensor | None]:
    """Return what is added to all codes, the least and largest code then, and the zeros (out, groups) that remain."""
    zeros = grid.zeros
    low, high = (int(found) for found in grid.codes.aminmax())
    if zeros is not None and bool((zeros == zeros[0, 0]).all()):
        shift = -int(zeros[0, 0])
        if low + shift >= -128 and high + shift <= 127:
            return shift, low + shift, high + shift, None
    if high <= 127 and (zeros is None or int(zeros.max()) <= 127):
        return 0, low, high, zeros
    return -128, low - 128, high - 128, (torch.zeros_like(grid.scales) if zeros is None else zeros) - 128


def _table(raw: Tensor, shift: int, low: int, high: int) -> Tensor | None:
    """Return the sixteen integers that hold all codes, (16,) int8; None if that takes eight bits.

    Args:
        raw: codes as bytes.
        shift: what is added to each.
        low: the least after that.
        high: the largest after that.
    """
    for table in TABLES:
        if table[0] <= low and high <= table[-1]:
            each = torch.tensor(table, dtype=torch.int8)
            is_even = table[-1] - table[0] + 1 == len(table)
            if is_even or set(raw.unique().tolist()) <= {(entry - shift) % 256 for entry in table}:
                return each
    return None


def _stored(values: Tensor, units: Tensor | None, group: int) -> tuple[str, Tensor, Tensor | None]:
    """Return how numbers (out, groups) are stored, and what is stored: the numbers, and what they are multiples of."""
    if units is not None and WIDE % group == 0:
        wide = units.repeat_interleave(WIDE // group, 1)[:, : values.shape[1]]
        multiples = torch.where(wide == 0, torch.zeros_like(wide), values / wide).round().clamp(-128, 127)
        if torch.equal(multiples * wide, values) and torch.equal(units.half().float(), units):
            return "multiples", multiples.to(torch.int8), units.half()
    half = values.half()
    if torch.equal(half.float(), values):
        return "halves", half, None
    return "floats", values, None


def _side(
    group: int, kinds: Mapping[str, str], table: Tensor | None, arrays: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a ``GridSide`` with its arrays behind it, and views of them by name."""
    names = ("scales", "scale_units", "offsets", "offset_units", "zeros", "order")
    places, size = {}, HEADER
    for name in names:
        places[name] = size if name in arrays else 0
        size += -(-arrays[name].nbytes // LINE) * LINE if name in arrays else 0
    flags = (int("zeros" in arrays), int("order" in arrays))
    numbers = [group, KINDS[kinds["scales"]], KINDS[kinds["offsets"]], *flags, *(places[name] for name in names)]
    side = torch.zeros(size, dtype=torch.uint8)
    head = torch.tensor(numbers).view(torch.uint8)
    side[: len(head)] = head
    views = {}
    for name, values in arrays.items():
        stop = places[name] + values.nbytes
        side[places[name] : stop] = values.contiguous().view(torch.uint8).flatten()
        views[name] = side[places[name] : stop].view(values.dtype).view(values.shape)
    if table is not None:
        side[len(head) : len(head) + 16] = table.view(torch.uint8)
        views["table"] = side[len(head) : len(head) + 16].view(torch.int8)
    return side, views


def _tile(codes: Tensor, *steps: int) -> Tensor:
    """Arrange codes by tiles, (n * 16, groups * 64) -> (n, groups, *steps, 16, 4)."""
    split = codes.view(-1, LANES, codes.shape[1] // GROUP, *steps, 4)
    return split.permute(0, *range(2, split.dim() - 1), 1, split.dim() - 1)
