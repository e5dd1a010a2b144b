"""Weights as choices among sixteen numbers (``lut4``): for models that were made so, and where integers are not wanted.

Sixteen outputs side by side, a tile of the native layout, share sixteen bfloat16 entries; a weight is the four-bit
code of one of them. The entries are the means of clusters: Lloyd's algorithm on the tile's sorted weights, whose
running sums give the means of all intervals at once. A tile that has no more than sixteen different weights keeps
them, so a palettized model is stored without loss. Native products are those of bfloat16 tiles, bit for bit.
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
STEP = 8
"""Inputs whose codes of sixteen outputs fill 64 bytes."""

SPREAD = 3**0.5
"""Entries begin as quantiles of a normal distribution this much wider, where they nearly end if weights are normal."""

ROUNDS = 40


@dataclass(frozen=True)
class Palette:
    """A matrix of codes, as the native bodies read it."""

    codes: Tensor
    """(tiles, steps, 16, 2, 2) uint8: by output, the parity of the input, and byte of a word of four codes."""
    entries: Tensor
    """(tiles, 16) bfloat16, rising."""
    out_width: int
    in_width: int

    @property
    def format(self) -> Literal["lut4"]:
        """The format's name."""
        return "lut4"

    @property
    def scales(self) -> Tensor:
        """What belongs to the codes."""
        return self.entries

    @property
    def nbytes(self) -> int:
        """Of codes and entries."""
        return self.codes.nbytes + self.entries.nbytes

    def dense(self) -> Tensor:
        """(out, in) float32: the weights that are meant."""
        return self._weights(torch.arange(len(self.codes), device=self.codes.device))[: self.out_width].float()

    def rows(self, index: Tensor) -> Tensor:
        """Some rows of ``dense``, (n,) -> (n, in)."""
        each = torch.arange(len(index), device=index.device) * LANES + index % LANES
        return self._weights(index // LANES)[each].float()

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x W^T + b`` in x's dtype, (T, in) -> (T, out), a row's bits its own."""
        return linear(x, self.dense().to(x.dtype), None if bias is None else bias.to(x.dtype))

    def _weights(self, tiles: Tensor) -> Tensor:
        """(n,) -> (n * 16, in) bfloat16."""
        codes = self.codes[tiles]
        nibbles = torch.stack((codes & 15, codes >> 4), -1)  # (n, steps, 16, 2, 2, 2)
        codes = nibbles.flatten(-2).permute(0, 2, 1, 4, 3)  # (n, 16, steps, 4, 2): input = 8 step + 2 pair + parity
        chosen = self.entries[tiles].gather(1, codes.reshape(len(tiles), -1).long())
        return chosen.view(len(tiles) * LANES, -1)[:, : self.in_width]


def num_bytes(out_width: int, in_width: int) -> int:
    """Of a matrix."""
    tiles, steps = -(-out_width // LANES), -(-in_width // STEP)
    return tiles * (steps * 4 * LANES + ENTRIES * 2)


def palettize(weight: Tensor) -> Palette:
    """Choose entries and codes for a matrix (out, in), tile after tile."""
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
    """Sixteen rising entries for each row of numbers, (n, count) -> (n, 16) bfloat16.

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
    """Codes of the nearest entries, (n, count) and (n, 16) rising -> (n, count) uint8."""
    return torch.searchsorted(_middles(entries.float()), values).to(torch.uint8)


def _means(ordered: Tensor) -> Tensor:
    """Of the clusters of rising numbers, (n, count) -> (n, 16) float32; a cluster without numbers keeps its entry."""
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
    return ((entries[:, 1:] + entries[:, :-1]) / 2).contiguous()


def _tile(codes: Tensor) -> Tensor:
    """(rows, in) -> (n, steps, 16, 2, 2): of an output and parity, the codes of four pairs of inputs in a word."""
    padded = F.pad(codes, (0, -codes.shape[1] % STEP, 0, -len(codes) % LANES))
    split = padded.view(-1, LANES, padded.shape[1] // STEP, 4, 2).permute(0, 2, 1, 4, 3)  # (n, steps, 16, 2, 4)
    return split[..., 0::2] | split[..., 1::2] << 4
