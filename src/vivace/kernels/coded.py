"""Matrices as files hold them in few bits: codes of outputs side by side, before they are laid out for the kernels.

``PaletteCodes`` and ``RowCodes`` stand between a file and the native layouts, so that a matrix is never there as
numbers of 16 bits: ``packed`` lays its codes out in tiles, without rounding anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.kernels.library import GROUP, LANES
from vivace.kernels.low_bit import LowBit, Rounded, int8_of
from vivace.kernels.palette import int_palette_of, palette_of

AT_ONCE = 1 << 22
"""Weights that are decoded at a time, which bounds the memory of wider copies."""


class Coded(Protocol):
    """A matrix (out, in) in few bits."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and of inputs."""

    @property
    def kind(self) -> str:
        """Name of the number format."""

    def rows(self, start: int, stop: int) -> Coded:
        """Return outputs ``start`` .. ``stop - 1``; ``start`` is a multiple of sixteen."""

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights (out, in), each rounded once."""

    def packed(self) -> Rounded:
        """Lay the codes out for the kernels; nothing is rounded."""


@dataclass(frozen=True, eq=False)
class PaletteCodes:
    """Codes into the entries of their tile, sixteen outputs."""

    codes: Tensor
    """(out, in) uint8, below 2^bits."""
    entries: Tensor
    """(tiles, 2^bits) in rising order: bfloat16, or int8 with scales."""
    scales: Tensor | None = None
    """(out, groups) bfloat16 factors for 64 inputs each; None for bfloat16 entries."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and of inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.entries.shape[1].bit_length() - 1

    @property
    def kind(self) -> str:
        """Name of the number format."""
        return f"lut{self.bits}" + ("" if self.scales is None else "_ints")

    def rows(self, start: int, stop: int) -> PaletteCodes:
        """Return outputs ``start`` .. ``stop - 1``; ``start`` is a multiple of sixteen."""
        assert start % LANES == 0
        entries = self.entries[start // LANES : -(-stop // LANES)]
        return PaletteCodes(self.codes[start:stop], entries, None if self.scales is None else self.scales[start:stop])

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights (out, in), each rounded once."""
        out, width = self.shape
        values = torch.empty(out, width, dtype=dtype, device=self.codes.device)
        step = max(1, AT_ONCE // (width * LANES)) * LANES
        for first in range(0, out, step):
            part = self.rows(first, min(first + step, out))
            chosen = part.entries.repeat_interleave(LANES, 0)[: len(part.codes)].gather(1, part.codes.long()).float()
            if part.scales is not None:
                chosen *= part.scales.float().repeat_interleave(GROUP, 1)[:, :width]
            values[first : first + step] = chosen
        return values

    def packed(self) -> Rounded:
        """Lay the codes out for the kernels; nothing is rounded."""
        if self.scales is None:
            return palette_of(self.codes, self.entries)
        return int_palette_of(self.codes, self.entries, self.scales)

    def widened(self, bits: int) -> PaletteCodes:
        """Return the same weights with codes of more bits."""
        missing = 2**bits - self.entries.shape[1]
        entries = torch.cat((self.entries, self.entries[:, -1:].expand(-1, missing)), 1)
        return PaletteCodes(self.codes, entries, self.scales)


@dataclass(frozen=True, eq=False)
class RowCodes:
    """Integers of eight bits times a scale for each output."""

    codes: Tensor
    """(out, in) int8, none of them -128."""
    scales: Tensor
    """(out,) float32."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and of inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def kind(self) -> str:
        """Name of the number format."""
        return "int8_rows"

    @staticmethod
    def of(weight: Tensor) -> RowCodes:
        """Round a matrix (out, in), as ``int8`` weights are rounded."""
        wide = weight.float()
        most = wide.abs().amax(1)
        scales = torch.where(most < 1e-30, 0.0, most / 127)
        inverse = torch.where(scales == 0, 0.0, 1 / scales)
        return RowCodes((wide * inverse[:, None]).round().clamp(-127, 127).to(torch.int8), scales)

    def rows(self, start: int, stop: int) -> RowCodes:
        """Return outputs ``start`` .. ``stop - 1``."""
        return RowCodes(self.codes[start:stop], self.scales[start:stop])

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights (out, in), each rounded once."""
        values = torch.empty(self.shape, dtype=dtype)
        step = max(1, AT_ONCE // self.shape[1])
        for first in range(0, len(values), step):
            part = slice(first, first + step)
            values[part] = self.codes[part].float() * self.scales[part, None]
        return values

    def packed(self) -> LowBit:
        """Lay the codes out for the kernels; nothing is rounded."""
        return int8_of(self.codes, self.scales)


def stacked(parts: Sequence[Coded]) -> Coded | None:
    """Return several matrices of the same inputs as one, their outputs below each other, without changing a weight.

    None where that is not possible: they are of different kinds, or one that has others below it ends within a tile.
    """
    if len(parts) == 1:
        return parts[0]
    rows = [part for part in parts if isinstance(part, RowCodes)]
    if len(rows) == len(parts):
        return RowCodes(torch.cat([part.codes for part in rows]), torch.cat([part.scales for part in rows]))
    palettes = [part for part in parts if isinstance(part, PaletteCodes)]
    is_even = all(part.shape[0] % LANES == 0 for part in palettes[:-1])
    if len(palettes) < len(parts) or not is_even or len({part.scales is None for part in palettes}) > 1:
        return None
    bits = max(part.bits for part in palettes)
    palettes = [part.widened(bits) for part in palettes]
    scales = [part.scales for part in palettes if part.scales is not None]
    codes, entries = (torch.cat([getattr(part, name) for part in palettes]) for name in ("codes", "entries"))
    return PaletteCodes(codes, entries, torch.cat(scales) if scales else None)


def packed_bits(codes: Tensor, bits: int) -> Tensor:
    """Write codes as one string of bits for each output, lowest first, (out, in) -> (out, ceil(in bits / 8)) uint8."""
    each = (codes[:, :, None] >> torch.arange(bits, dtype=torch.uint8)) & 1
    string = F.pad(each.flatten(1), (0, -codes.shape[1] * bits % 8)).view(len(codes), -1, 8)
    return (string << torch.arange(8, dtype=torch.uint8)).sum(2, dtype=torch.uint8)


def unpacked_bits(string: Tensor, bits: int, width: int) -> Tensor:
    """Read what ``packed_bits`` wrote, (out, bytes) -> (out, width) uint8."""
    if bits == 8:
        return string
    places = torch.arange(width) * bits
    first, shift = places // 8, (places % 8).to(torch.int16)
    low = string[:, first].to(torch.int16)
    high = string[:, (first + 1).clamp(max=string.shape[1] - 1)].to(torch.int16)
    codes: Tensor = (low | high << 8) >> shift & (1 << bits) - 1
    return codes.to(torch.uint8)
