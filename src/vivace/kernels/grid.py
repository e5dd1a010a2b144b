"""Weights that a file holds as integer codes: a weight is ``scale * (code - zero) + offset``.

This is the one value between the files of other programs and the kernels. All integer formats that are read become it
without any rounding: GGUF's blocks of codes and MLX have offsets, GPTQ, AWQ and compressed-tensors the code that stands
for zero. ``group`` neighbouring inputs of an output share these numbers. What is no grid (nf4, fp4, fp8) is decoded
where it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WIDE = 256
"""Number of inputs that share a number which scales may be multiples of."""

DECODED_AT_A_TIME = 1 << 22
"""Weights that are decoded at a time, which bounds the memory of float32 copies."""


@dataclass(frozen=True, eq=False)
class Grid:
    """A matrix (out, in) of codes."""

    codes: Tensor
    """(out, in) uint8 or int8."""
    scales: Tensor
    """(out, groups) float32."""
    group: int
    """Number of neighbouring inputs that share a scale; the last group may have fewer."""
    zeros: Tensor | None = None
    """(out, groups) float32 integers; None where the code 0 stands for zero."""
    offsets: Tensor | None = None
    """(out, groups) float32; None where nothing is added."""
    units: Tensor | None = None
    """(out, in / 256) float32: what the scales of these inputs are integer multiples of, where a file has them so."""
    offset_units: Tensor | None = None
    """The same of offsets."""
    order: Tensor | None = None
    """(in,) int64: the input that each column of ``codes`` belongs to; None if they are in order."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and of inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, start: int, stop: int) -> Grid:
        """Return the outputs ``start`` .. ``stop - 1``, as views."""
        return self._each(lambda values: values[start:stop])

    def reordered(self, heads: int) -> Grid:
        """Return the outputs of each head in the order of Hugging Face, given llama.cpp's: component i stands beside
        i + D / 2 there.
        """

        def halves(values: Tensor) -> Tensor:
            by_pair = values.view(heads, -1, 2, values.shape[1])
            return by_pair.transpose(1, 2).reshape(values.shape)

        return self._each(halves)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Grid:
        """Return a grid of what becomes of everything that has outputs."""
        zeros, offsets, units, offset_units = (
            None if each is None else change(each) for each in (self.zeros, self.offsets, self.units, self.offset_units)
        )
        codes, scales = change(self.codes), change(self.scales)
        return Grid(codes, scales, self.group, zeros, offsets, units, offset_units, self.order)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights (out, in), each rounded to float32 at most once and then to ``dtype``."""
        out, width = self.shape
        values = torch.empty(out, width, dtype=dtype)
        step = max(1, DECODED_AT_A_TIME // max(1, width))
        for first in range(0, out, step):
            values[first : first + step] = self.rows(first, first + step)._decoded()
        return values

    def _decoded(self) -> Tensor:
        """Return all weights in float32 at once."""
        width = self.codes.shape[1]
        values = self.codes.float()
        if self.zeros is not None:
            values -= self._wide(self.zeros, width)
        values *= self._wide(self.scales, width)
        if self.offsets is not None:
            values += self._wide(self.offsets, width)
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order, values)

    def _wide(self, factors: Tensor, width: int) -> Tensor:
        """Repeat a number of each group for its inputs, (out, groups) -> (out, in)."""
        return factors.repeat_interleave(self.group, 1)[:, :width]


def stacked(grids: Sequence[Grid]) -> Grid | None:
    """Return grids of the same inputs as one, their outputs below each other, without changing a weight.

    Groups become as small as the smallest. None where that is not possible: inputs are in different orders, or the
    sizes of groups are not multiples of each other.
    """
    first = grids[0]
    if len(grids) == 1:
        return first
    width, group = first.shape[1], min(each.group for each in grids)
    orders = [each.order for each in grids]
    is_same = all(
        order is first.order or (order is not None and first.order is not None and torch.equal(order, first.order))
        for order in orders
    )
    if not is_same or any(each.group % group and each.group < width for each in grids):
        return None
    count = -(-width // group)

    def fine(values: Tensor | None, each: Grid) -> Tensor:
        if values is None:
            return torch.zeros(each.shape[0], count)
        times = count if each.group >= width else each.group // group
        return values.repeat_interleave(times, 1)[:, :count]

    def joined(name: str) -> Tensor | None:
        found = [getattr(each, name) for each in grids]
        if all(values is None for values in found):
            return None
        return torch.cat([fine(values, each) for values, each in zip(found, grids, strict=True)])

    def units(name: str) -> Tensor | None:
        found = [getattr(each, name) for each in grids]
        return None if any(values is None for values in found) else torch.cat(found)

    kinds = {each.codes.dtype for each in grids}
    codes = torch.cat([each.codes if len(kinds) == 1 else each.codes.short() for each in grids])
    scales = joined("scales")
    assert scales is not None
    zeros, offsets = joined("zeros"), joined("offsets")
    return Grid(codes, scales, group, zeros, offsets, units("units"), units("offset_units"), first.order)
