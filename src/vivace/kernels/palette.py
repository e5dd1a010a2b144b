"""Weights as codes of two, three or four bits into a codebook, found by clustering.

The weights of sixteen neighbouring outputs (a tile of the native layout) share a codebook of ``2^bits`` entries:

* ``Palette`` (``lut2``, ``lut3``, ``lut4``): entries in bfloat16. Inputs are not quantized; native products are those
  of bfloat16 tiles, bit for bit. A tile with at most as many different weights as entries keeps exactly these, so a
  model that was palettised before is stored without loss.
* ``IntPalette`` (``lut2_ints``, ``lut3_ints``, ``lut4_ints``): entries are integers -127..127, times a bfloat16 scale
  for each output and 64 inputs. They are multiplied as those of ``q4``, with inputs quantized to eight bits.

``cluster`` finds entries by Lloyd's algorithm (S. Lloyd, *Least squares quantization in PCM*, 1982) on the sorted
weights of a tile, whose running sums give the means of all intervals at once; each weight may count by its importance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.kernels.library import GROUP, LANES
from vivace.kernels.reference import linear

BITS = (2, 3, 4)
"""Bits that a code may have."""

PAIRS = {2: 8, 3: 16, 4: 4}
"""Pairs of inputs in a block of words, by bits."""
PARTS = {2: 4, 3: 8, 4: 2}
"""Steps of four inputs in a block of bytes, by bits."""
PLANES = {2: 1, 3: 3, 4: 1}
"""Times 64 bytes that a block of sixteen outputs takes."""

SPREAD = 3**0.5
"""Initial entries are quantiles of a normal distribution with this multiple of the weights' standard deviation, near
the solution for normally distributed weights."""

ROUNDS = 40
"""Iterations of Lloyd's algorithm."""


@dataclass(frozen=True)
class Palette:
    """A matrix of codes into bfloat16 entries, in the layout of the native kernels."""

    codes: Tensor
    """(tiles, blocks, planes, 16, 2, 2) uint8: by output, parity of the input, and byte of a word of codes."""
    entries: Tensor
    """(tiles, 2^bits) bfloat16 codebooks in rising order."""
    out_width: int
    in_width: int

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.entries.shape[1].bit_length() - 1

    @property
    def format(self) -> str:
        """The format's name."""
        return f"lut{self.bits}"

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
        codes = _codes_of_words(self.codes[tiles], self.bits)
        chosen = self.entries[tiles].gather(1, codes.reshape(len(tiles), -1).long())
        return chosen.view(len(tiles) * LANES, -1)[:, : self.in_width]


@dataclass(frozen=True)
class IntPalette:
    """A matrix of codes into integers that are scaled, in the layout of the native kernels."""

    bits: int
    codes: Tensor
    """(tiles, groups, blocks, planes, 16, 4) uint8, by output and input of a step."""
    table: Tensor
    """(tiles, 16) int8: the entries of each tile in rising order, over again where there are fewer than sixteen."""
    scales: Tensor
    """(tiles, groups, 16) bfloat16."""
    out_width: int
    in_width: int

    @property
    def format(self) -> str:
        """The format's name."""
        return f"lut{self.bits}_ints"

    @property
    def nbytes(self) -> int:
        """Bytes of codes, tables and scales."""
        return self.codes.nbytes + self.table.nbytes + self.scales.nbytes

    @property
    def groups(self) -> int:
        """Number of groups of inputs."""
        return self.codes.shape[1]

    def integers(self, tiles: Tensor | slice = slice(None)) -> Tensor:
        """Return the integers of some tiles, (n * 16, groups * 64) int8."""
        codes, table = _codes_of_bytes(self.codes[tiles], self.bits), self.table[tiles]
        chosen = table.gather(1, codes.reshape(len(table), -1).long())
        return chosen.view(len(table) * LANES, self.groups * GROUP)

    def factors(self, tiles: Tensor | slice = slice(None)) -> Tensor:
        """Return the scales of some tiles, (n * 16, groups) float32."""
        return self.scales[tiles].transpose(1, 2).reshape(-1, self.groups).float()

    def dense(self) -> Tensor:
        """Return the weights that the codes stand for, (out, in) float32."""
        return self._scaled(self.integers(), self.factors())[: self.out_width]

    def rows(self, index: Tensor) -> Tensor:
        """Return some rows of ``dense``, (n,) -> (n, in) float32."""
        tiles, lanes = index // LANES, index % LANES
        each = torch.arange(len(index), device=index.device) * LANES + lanes
        return self._scaled(self.integers(tiles)[each], self.factors(tiles)[each])

    def _scaled(self, integers: Tensor, factors: Tensor) -> Tensor:
        groups = integers.view(len(integers), -1, GROUP).float()
        return (groups * factors[:, :, None]).flatten(1)[:, : self.in_width]


def num_bytes(out_width: int, in_width: int, bits: int = 4, *, ints: bool = False) -> int:
    """Return the bytes of a matrix: its codes with their codebooks, or with tables of integers and scales."""
    tiles, groups = -(-out_width // LANES), -(-in_width // GROUP)
    if ints:
        return tiles * (groups * (GROUP * LANES * bits // 8 + 2 * LANES) + 16)
    blocks = -(-in_width // (2 * PAIRS[bits]))
    return tiles * (blocks * PLANES[bits] * 4 * LANES + (2 << bits))


def palette_of(codes: Tensor, entries: Tensor) -> Palette:
    """Lay out a matrix whose codes are known.

    Args:
        codes: (out, in) uint8, places in the entries of the output's tile.
        entries: (tiles, 2^bits) bfloat16.
    """
    bits = entries.shape[1].bit_length() - 1
    return Palette(_words_of(codes, bits), entries.contiguous(), *codes.shape)


def int_palette_of(codes: Tensor, entries: Tensor, scales: Tensor) -> IntPalette:
    """Lay out a matrix whose codes are known.

    Args:
        codes: (out, in) uint8, places in the entries of the output's tile.
        entries: (tiles, 2^bits) int8, none of them -128, which the products of some processors cannot take.
        scales: (out, groups) bfloat16, a scale for each 64 inputs.
    """
    bits, missing = entries.shape[1].bit_length() - 1, -len(codes) % LANES
    laid = F.pad(scales, (0, 0, 0, missing)).view(-1, LANES, scales.shape[1]).transpose(1, 2).contiguous()
    table = entries.repeat(1, 16 // entries.shape[1])
    return IntPalette(bits, _bytes_of(codes, bits), table, laid, *codes.shape)


def palettize(weight: Tensor, bits: int = 4) -> Palette:
    """Find codebooks and codes for a matrix (out, in), some tiles at a time."""
    out_width, in_width = weight.shape
    tiles = -(-out_width // LANES)
    codes = torch.empty(out_width, in_width, dtype=torch.uint8)
    entries = torch.empty(tiles, 2**bits, dtype=torch.bfloat16)
    whole = out_width // LANES
    for first, stop in (*((at, min(at + LANES, whole)) for at in range(0, whole, LANES)), (whole, tiles)):
        if first == stop:
            continue
        part = slice(first * LANES, stop * LANES)
        rows = weight[part].reshape(stop - first, -1).float()
        entries[first:stop] = cluster(rows, bits)
        codes[part] = nearest(rows, entries[first:stop]).view(-1, in_width)
    return palette_of(codes, entries)


def cluster(values: Tensor, bits: int = 4) -> Tensor:
    """Return rising entries for each row of numbers, (n, count) -> (n, 2^bits) bfloat16.

    A row with at most as many different numbers keeps exactly these.
    """
    num_entries = 2**bits
    ordered = values.sort(1).values
    entries = lloyd(ordered, bits).bfloat16()
    is_new = torch.ones_like(ordered, dtype=torch.bool)
    is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    for row in (is_new.sum(1) <= num_entries).nonzero().flatten().tolist():
        different = ordered[row][is_new[row]].bfloat16()
        entries[row] = F.pad(different[None], (0, num_entries - len(different)), mode="replicate")[0]
    return entries


def nearest(values: Tensor, entries: Tensor) -> Tensor:
    """Return the codes of the nearest entries, (n, count) and (n, 2^bits) rising -> (n, count) uint8."""
    return torch.searchsorted(_middles(entries.float()), values.contiguous()).to(torch.uint8)


def lloyd(ordered: Tensor, bits: int, importance: Tensor | None = None, rounds: int = ROUNDS) -> Tensor:
    """Return cluster means of rising numbers, (n, count) -> (n, 2^bits) float32; empty clusters keep their entry.

    Args:
        ordered: (n, count), rising.
        bits: of the codes.
        importance: (n, count) weights of the numbers, not negative; None counts all alike.
        rounds: iterations.
    """
    mass = torch.ones_like(ordered) if importance is None else importance
    sums, masses = (F.pad(part.double().cumsum(1), (1, 0)) for part in (ordered * mass, mass))
    mean, spread = ordered.mean(1, keepdim=True), ordered.std(1, keepdim=True, unbiased=False) * SPREAD
    places = (torch.arange(2**bits, device=ordered.device) + 0.5) / 2**bits
    means: Tensor = (mean + spread * torch.special.ndtri(places)).clamp(ordered[:, :1], ordered[:, -1:])
    for _ in range(rounds):
        ends = F.pad(torch.searchsorted(ordered, _middles(means), right=True), (1, 0))
        ends = F.pad(ends, (0, 1), value=ordered.shape[1])
        count, total = masses.gather(1, ends).diff(dim=1), sums.gather(1, ends).diff(dim=1)
        means = torch.where(count > 0, total / count, means.double()).float()
    return means


def _middles(entries: Tensor) -> Tensor:
    """Return the midpoints between neighbouring entries, (n, K) -> (n, K - 1)."""
    return ((entries[:, 1:] + entries[:, :-1]) / 2).contiguous()


def _words_of(codes: Tensor, bits: int) -> Tensor:
    """Arrange codes (out, in) as words, (tiles, blocks, planes, 16, 2, 2) uint8 (``LUT*`` in ``native/abi.h``)."""
    width = 2 * PAIRS[bits]
    padded = F.pad(codes, (0, -codes.shape[1] % width, 0, -len(codes) % LANES))
    split = padded.view(-1, LANES, padded.shape[1] // width, PAIRS[bits], 2)
    by_pair = split.permute(3, 0, 2, 1, 4).int()  # (pairs, tiles, blocks, 16, 2)
    if bits == 3:
        last = by_pair[15]
        each = (_joined(by_pair[5 * k : 5 * k + 5], bits) | (last >> k & 1) << 15 for k in range(3))
        words = torch.stack(tuple(each), 2)
    else:
        words = _joined(by_pair, bits)[:, :, None]
    each_byte: Tensor = words.contiguous().view(torch.uint8).unflatten(-1, (2, 4))
    return each_byte[..., :2].contiguous()


def _codes_of_words(words: Tensor, bits: int) -> Tensor:
    """Return the codes of some tiles in words, (n, blocks, planes, 16, 2, 2) -> (n, 16, inputs) uint8."""
    whole = words[..., 0].int() | words[..., 1].int() << 8  # (n, blocks, planes, 16, 2)
    if bits == 3:
        each = [whole[:, :, j // 5] >> j % 5 * 3 & 7 for j in range(15)]
        each.append(sum((whole[:, :, k] >> 15 << k for k in range(3)), start=torch.zeros_like(whole[:, :, 0])))
    else:
        each = [whole[:, :, 0] >> bits * j & 2**bits - 1 for j in range(PAIRS[bits])]
    return torch.stack(each, 3).permute(0, 2, 1, 3, 4).flatten(2).to(torch.uint8)


def _bytes_of(codes: Tensor, bits: int) -> Tensor:
    """Arrange codes (out, in) as bytes, (tiles, groups, blocks, planes, 16, 4) uint8 (``LUT*_INTS``)."""
    padded = F.pad(codes, (0, -codes.shape[1] % GROUP, 0, -len(codes) % LANES))
    groups, parts = padded.shape[1] // GROUP, PARTS[bits]
    split = padded.view(-1, LANES, groups, GROUP // (4 * parts), parts, 4)
    steps = split.permute(4, 0, 2, 3, 1, 5)  # (parts, tiles, groups, blocks, 16, 4)
    if bits == 3:
        first, second = (_joined(steps[k : k + 2], 3) | (steps[6 + k // 2] & 3) << 6 for k in (0, 2))
        third = _joined(steps[4:6], 3) | (steps[6] >> 2) << 6 | (steps[7] >> 2) << 7
        return torch.stack((first, second, third), 3).contiguous()
    return _joined(steps, bits)[:, :, :, None].contiguous()


def _codes_of_bytes(planes: Tensor, bits: int) -> Tensor:
    """Return the codes of some tiles in bytes, (n, groups, blocks, planes, 16, 4) -> (n, 16, inputs) uint8."""
    if bits == 3:
        each = [planes[:, :, :, part // 2] >> part % 2 * 3 & 7 for part in range(6)]
        upper = planes[:, :, :, 2]
        each += [planes[:, :, :, k] >> 6 | (upper >> 6 + k & 1) << 2 for k in range(2)]
    else:
        each = [planes[:, :, :, 0] >> bits * part & 2**bits - 1 for part in range(PARTS[bits])]
    return torch.stack(each, 3).permute(0, 4, 1, 2, 3, 5).flatten(2)


def _joined(parts: Sequence[Tensor] | Tensor, bits: int) -> Tensor:
    """Return codes side by side in each number, the first lowest."""
    whole: Tensor = torch.zeros_like(parts[0])
    for place, part in enumerate(parts):
        whole |= part << bits * place
    return whole
