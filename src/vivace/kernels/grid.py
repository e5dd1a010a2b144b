"""Weights that a file holds as integer codes: a weight is ``scale * (code - zero) + offset``.

This is the one value between the files of other programs and the kernels. All integer formats that are read become it
without any rounding: GGUF's blocks of codes and MLX have offsets, GPTQ, AWQ and compressed-tensors the code that stands
for zero. ``group`` neighbouring inputs of an output share these numbers. What is no grid (nf4, fp4, fp8) is decoded
where it is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
    order: Tensor | None = None
    """(in,) int64: the input that each column of ``codes`` belongs to; None if they are in order."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and of inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, start: int, stop: int) -> Grid:
        """Return the outputs ``start`` .. ``stop - 1``, as views."""
        zeros = None if self.zeros is None else self.zeros[start:stop]
        offsets = None if self.offsets is None else self.offsets[start:stop]
        return Grid(self.codes[start:stop], self.scales[start:stop], self.group, zeros, offsets, self.order)

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
