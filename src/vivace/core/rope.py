"""Rotary position embeddings and how they are stretched beyond the trained length.

Frequencies of component pair i: ``f_i = theta^(-2i/width)``; a row at position p is rotated by ``p f_i``.

* linear (Chen et al. 2023, arXiv:2306.15595): ``f_i / factor``.
* dynamic: theta grows with the length seen so far, ``theta (factor n / n0 - (factor - 1))^(w/(w-2))``
  once n > n0. Here n belongs to the row (``Step.extent``), not to the call, so a row's rotation does not
  depend on its neighbours.
* llama3: low frequencies divided by factor, high ones kept, a linear ramp between.
* yarn (Peng et al. 2023, arXiv:2309.00071): ramp between interpolated and kept frequencies, with cosine
  and sine scaled by ``attention_factor``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vivace.core.config import RopeConfig


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """f_i for the static kinds, (width / 2,) float32; dynamic returns its unstretched ones."""
    width = rope.width or head_dim
    pairs = torch.arange(0, width, 2, dtype=torch.int64, device="cpu").float() / width  # also when built on "meta"
    base = 1.0 / rope.theta**pairs
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base, width)
    return base


def _llama3(rope: RopeConfig, base: Tensor) -> Tensor:
    low = rope.original_positions / rope.low_freq_factor
    high = rope.original_positions / rope.high_freq_factor
    wavelength = 2 * math.pi / base
    smooth = (rope.original_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    ramp = (1 - smooth) * base / rope.factor + smooth * base
    stretched = torch.where(wavelength > low, base / rope.factor, base)
    return torch.where((wavelength <= low) & (wavelength >= high), ramp, stretched)


def _yarn(rope: RopeConfig, base: Tensor, width: int) -> Tensor:
    def component(rotations: float) -> float:
        turns = math.log(rope.original_positions / (rotations * 2 * math.pi))
        return width * turns / (2 * math.log(rope.theta))

    low, high = component(rope.beta_fast), component(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(width // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)


CPU = torch.device("cpu")


class Rotary:
    """Cosines and signed sines of a rotary embedding, looked up by position.

    The table grows when a later position is asked for, so a long context costs nothing until it is used.
    """

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        self.rope = rope
        self.width = rope.width or head_dim
        self._frequencies = frequencies(rope, head_dim)
        self._table: tuple[Tensor, Tensor] | None = None

    def at(self, position: Tensor, extent: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, each (T, 1, width), for ``kernels.reference.rotate``.

        Args:
            position: (T,).
            extent: (T,) length of the text when the row was written (dynamic); None is position + 1.
            dtype: of the rows to be rotated.
        """
        if self.rope.kind == "dynamic":
            return self._dynamic(position, position + 1 if extent is None else extent, dtype)
        cos, sin = self.table(int(position.max()) + 1, dtype, position.device)
        return cos.index_select(0, position), sin.index_select(0, position)

    def table(self, count: int, dtype: torch.dtype, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
        """Those of at least the first ``count`` positions, each (positions, 1, width); not for the dynamic kind."""
        assert self.rope.kind != "dynamic"
        table = self._table
        if table is None or table[0].shape[0] < count or table[0].dtype != dtype:
            table = self._table = self._build(max(256, 2 * count), dtype, device)
        return table

    def _build(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._frequencies
        cos, sin = self._signed(angles, dtype)
        return cos.to(device), sin.to(device)

    def _dynamic(self, position: Tensor, extent: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rope, width = self.rope, self.width
        length = extent.clamp(min=rope.original_positions).double()
        grown = (rope.factor * length / rope.original_positions - (rope.factor - 1)) ** (width / (width - 2))
        pairs = torch.arange(0, width, 2, device=position.device).double() / width
        angles = position[:, None] * ((rope.theta * grown)[:, None] ** -pairs)
        return self._signed(angles.float(), dtype)

    def _signed(self, angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """In double precision: float32 cosines differ in the last bit with a number's place in the call."""
        angles = angles.double()
        cos = torch.cat((angles, angles), -1).cos() * self.rope.attention_factor
        sin = torch.cat((-angles, angles), -1).sin() * self.rope.attention_factor
        return cos[:, None].to(dtype), sin[:, None].to(dtype)
