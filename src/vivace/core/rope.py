"""Rotary position embeddings and their scaling to texts beyond the trained length.

The pair of components i has the frequency ``f_i = theta^(-2i/width)``; a row at position p is rotated by the angle
``p f_i``. The kinds of scaling are:

* linear (Chen et al. 2023, arXiv:2306.15595): ``f_i / factor``.
* dynamic: theta becomes ``theta (factor n / n0 - (factor - 1))^(w/(w-2))`` for a text of n > n0 tokens. **Where we
  differ** from transformers: n belongs to the row (``Step.extent``) and not to the call, so a row's rotation does not
  depend on the other rows.
* llama3: low frequencies are divided by factor, high ones are kept, with a linear ramp between them.
* yarn (Peng et al. 2023, arXiv:2309.00071): a ramp between divided and kept frequencies; cosine and sine are multiplied
  by ``attention_factor``.
* longrope (Ding et al. 2024, arXiv:2402.13753): ``f_i / s_i`` in texts of up to n0 tokens and ``f_i / l_i`` in longer
  ones, with cosine and sine multiplied by ``attention_factor``. **Where we differ** from transformers: a text whose
  prompt has at most n0 tokens ends at n0 (``ModelConfig.room``), where transformers reads all of it again.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from vivace.core.config import RopeConfig


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return f_i, (width / 2,) float32; for the dynamic kind without its scaling, which depends on the text, and for
    longrope those of short texts.
    """
    width = rope.width or head_dim
    pairs = torch.arange(0, width, 2, dtype=torch.int64, device="cpu").float() / width  # also when built on "meta"
    base = 1.0 / rope.theta**pairs
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base, width)
    if rope.kind == "longrope":
        return base / torch.tensor(rope.short_factors, dtype=torch.float32, device="cpu")
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
    """Cosines and signed sines of a rotary embedding, from a table by position.

    The table grows when a later position is needed, so a long context costs nothing until it is used.
    """

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        self.rope = rope
        self.width = rope.width or head_dim
        self._frequencies = frequencies(rope, head_dim)
        self._table: tuple[Tensor, Tensor] | None = None
        self._long: Rotary | None = None
        if rope.kind == "longrope":
            self._long = Rotary(replace(rope, kind="default"), head_dim)
            self._long._frequencies = frequencies(replace(rope, short_factors=rope.long_factors), head_dim)

    def at(
        self,
        position: Tensor,
        extent: Tensor | None,
        dtype: torch.dtype,
        whole: int | None = None,
        last: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the cosines and signed sines that ``kernels.reference.rotate`` takes, each (T, 1, width).

        Args:
            position: (T,) positions of the rows.
            extent: (T,) length of the text when the row was written (dynamic, longrope); None means position + 1.
            dtype: dtype of the rows to be rotated.
            whole: length of the texts where the rows are all of their tokens; longrope rotates every one as part of it.
            last: no position is above this; None asks the positions, for which a GPU waits.
        """
        if self.rope.kind == "dynamic":
            return self._dynamic(position, position + 1 if extent is None else extent, dtype)
        if self._long is not None:
            if extent is None:
                extent = position + 1 if whole is None else torch.full_like(position, whole)
            return self._by_length(position, extent, dtype)
        return self._from_table(position, dtype, last)

    def _from_table(self, position: Tensor, dtype: torch.dtype, last: int | None = None) -> tuple[Tensor, Tensor]:
        count = (int(position.max()) if last is None else last) + 1
        cos, sin = self.table(count, dtype, position.device)
        return cos.index_select(0, position), sin.index_select(0, position)

    def _by_length(self, position: Tensor, extent: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the rotations of rows of short texts and of long ones."""
        assert self._long is not None
        is_long = extent > self.rope.original_positions
        if not is_long.any():
            return self._from_table(position, dtype)
        long = self._long._from_table(position, dtype)
        if is_long.all():
            return long
        pairs = zip(long, self._from_table(position, dtype), strict=True)
        cos, sin = (torch.where(is_long[:, None, None], far, near) for far, near in pairs)
        return cos, sin

    def in_front(self, count: int, dtype: torch.dtype, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
        """Return those of the positions -count..-1, which stand in front of a text, each (count, 1, width).

        Raises:
            AssertionError: rotations depend on the length of the text.
        """
        assert self.rope.kind not in ("dynamic", "longrope")
        angles = torch.arange(-count, 0, dtype=torch.float32, device="cpu")[:, None] * self._frequencies
        cos, sin = self._signed(angles, dtype)
        return cos.to(device), sin.to(device)

    def table(self, count: int, dtype: torch.dtype, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
        """Return those of at least ``count`` positions, each (positions, 1, width); for longrope those of short texts,
        and none for the dynamic kind.
        """
        assert self.rope.kind != "dynamic"
        table = self._table
        if table is None or table[0].shape[0] < count or (table[0].dtype, table[0].device) != (dtype, device):
            table = self._table = self._build(max(256, 2 * count), dtype, device)
        return table

    def _build(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        angles = torch.arange(length, dtype=torch.float32, device="cpu")[:, None] * self._frequencies
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
        """Return cosines and signed sines of angles (T, width / 2), each (T, 1, width).

        They are computed in double precision: float32 cosines differ in the last bit with a number's place in the call.
        """
        angles = angles.double()
        cos = torch.cat((angles, angles), -1).cos() * self.rope.attention_factor
        sin = torch.cat((-angles, angles), -1).sin() * self.rope.attention_factor
        return cos[:, None].to(dtype), sin[:, None].to(dtype)
