"""Weights as four-bit codes into a codebook of sixteen bfloat16 numbers (``lut4``), found by clustering.

The weights of sixteen neighbouring outputs (a tile of the native layout) share a codebook. Its entries are the means of
clusters, found by Lloyd's algorithm on the sorted weights of the tile, whose running sums give the means of all
intervals at once. A tile with at most sixteen different weights keeps exactly these, so a model that was palettised
before is stored without loss. Inputs are not quantized: native products are those of bfloat16 tiles, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.kernels.library import LANES
from vivace.kernels.reference import linear

ENTRIES = 16
"""Entries of a codebook, as many as a code of four bits selects from."""
STEP = 8
"""Inputs whose codes of sixteen outputs fill 64 bytes."""

SPREAD = 3**0.5
"""Initial entries are quantiles of a normal distribution with this multiple of the weights' standard deviation, near
the solution for normally distributed weights."""

ROUNDS = 40
"""Iterations of Lloyd's algorithm."""


@dataclass(frozen=True)
class Palette:
    """A matrix of codes with its codebooks, in the layout of the native kernels."""

    codes: Tensor
    """(tiles, steps, 16, 2, 2) uint8: by output, parity of the input, and byte of a word of four codes."""
    entries: Tensor
    """(tiles, 16) bfloat16 codebooks in rising order."""
    out_width: int
    in_width: int

    @property
    def format(self) -> Literal["lut4"]:
        """The format's name."""
        return "lut4"

    @property
    def scales(self) -> Tensor:
        """The codebooks, under the name that all formats have for what is beside the codes."""
        return self.entries

    @property
    def nbytes(self) -> int:
        """Bytes of codes and codebooks."""
        return self.codes.nbytes + self.entries.nbytes

    def dense(self) -> Tensor:
        """Return the weights that the codes stand for, (out, in) float32."""
        return self._weights(torch.arange(len(self.codes), device=self.codes.device))[: self.out_width].float()

    def rows(self, index: Tensor) -> Tensor:
        """Return some rows of ``dense``, (n,) -> (n, in) float32."""
        each = torch.arange(len(index), device=index.device) * LANES + index % LANES
        return self._weights(index // LANES)[each].float()

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x W^T + b`` in x's dtype, (T, in) -> (T, out); a row's bits do not depend on other rows."""
        return linear(x, self.dense().to(x.dtype), None if bias is None else bias.to(x.dtype))

    def _weights(self, tiles: Tensor) -> Tensor:
        """Return the weights of some tiles, (n,) -> (n * 16, in) bfloat16."""
        codes = self.codes[tiles]
        nibbles = torch.stack((codes & 15, codes >> 4), -1)  # (n, steps, 16, 2, 2, 2)
        codes = nibbles.flatten(-2).permute(0, 2, 1, 4, 3)  # (n, 16, steps, 4, 2): input = 8 step + 2 pair + parity
        chosen = self.entries[tiles].gather(1, codes.reshape(len(tiles), -1).long())
        return chosen.view(len(tiles) * LANES, -1)[:, : self.in_width]


def num_bytes(out_width: int, in_width: int) -> int:
    """Return the bytes of codes and codebooks of a matrix."""
    tiles, steps = -(-out_width // LANES), -(-in_width // STEP)
    return tiles * (steps * 4 * LANES + ENTRIES * 2)


def palettize(weight: Tensor) -> Palette:
    """Find codebooks and codes for a matrix (out, in), some tiles at a time."""
    out_width, in_width = weight.shape
    tiles = -(-out_width // LANES)
    codes = torch.zeros(tiles, -(-in_width // STEP), LANES, 2, 2, dtype=torch.uint8)
    entries = torch.empty(tiles, ENTRIES, dtype=torch.bfloat16)
    whole = out_width // LANES
    for first, stop in (*((at, min(at + LANES, whole)) for at in range(0, whole, LANES)), (whole, tiles)):
        if first == stop:
            continue
        rows = weight[first * LANES : stop * LANES].reshape(stop - first, -1).float()
        entries[first:stop] = cluster(rows)
        codes[first:stop] = _tile(nearest(rows, entries[first:stop]).view(-1, in_width))
    return Palette(codes, entries, out_width, in_width)


def cluster(values: Tensor) -> Tensor:
    """Return sixteen rising entries for each row of numbers, (n, count) -> (n, 16) bfloat16.

    Source: S. Lloyd, Least squares quantization in PCM, 1982.
    """
    ordered = values.sort(1).values
    means = _means(ordered)
    entries = means.bfloat16()
    is_new = torch.ones_like(ordered, dtype=torch.bool)
    is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    for row in (is_new.sum(1) <= ENTRIES).nonzero().flatten().tolist():
        different = ordered[row][is_new[row]].bfloat16()
        entries[row] = F.pad(different[None], (0, ENTRIES - len(different)), mode="replicate")[0]
    return entries


def nearest(values: Tensor, entries: Tensor) -> Tensor:
    """Return the codes of the nearest entries, (n, count) and (n, 16) rising -> (n, count) uint8."""
    return torch.searchsorted(_middles(entries.float()), values).to(torch.uint8)


def _means(ordered: Tensor) -> Tensor:
    """Return cluster means of rising numbers, (n, count) -> (n, 16) float32; empty clusters keep their entry."""
    sums = F.pad(ordered.double().cumsum(1), (1, 0))
    mean, spread = ordered.mean(1, keepdim=True), ordered.std(1, keepdim=True, unbiased=False) * SPREAD
    places = (torch.arange(ENTRIES) + 0.5) / ENTRIES
    means: Tensor = (mean + spread * torch.special.ndtri(places)).clamp(ordered[:, :1], ordered[:, -1:])
    for _ in range(ROUNDS):
        ends = F.pad(torch.searchsorted(ordered, _middles(means), right=True), (1, 0))
        ends = F.pad(ends, (0, 1), value=ordered.shape[1])
        count, total = ends.diff(dim=1), sums.gather(1, ends).diff(dim=1)
        means = torch.where(count > 0, total / count, means.double()).float()
    return means


def _middles(entries: Tensor) -> Tensor:
    """Return the midpoints between neighbouring entries, (n, 16) -> (n, 15)."""
    return ((entries[:, 1:] + entries[:, :-1]) / 2).contiguous()


def _tile(codes: Tensor) -> Tensor:
    """Arrange codes by tiles, (rows, in) -> (n, steps, 16, 2, 2).

    A word of 16 bits holds, for one output and one parity of the input, the codes of four pairs of inputs.
    """
    padded = F.pad(codes, (0, -codes.shape[1] % STEP, 0, -len(codes) % LANES))
    split = padded.view(-1, LANES, padded.shape[1] // STEP, 4, 2).permute(0, 2, 1, 4, 3)  # (n, steps, 16, 2, 4)
    return split[..., 0::2] | split[..., 1::2] << 4
