"""Quantized weights: how matrices are quantized, how they are laid out, and their products with rows.

* ``int8``: integers -127..127 times a float32 scale for each output, which maps the largest weight to 127.
* ``q4``: codes into a table of 16 integers (``TABLE``, denser around zero, where most weights are) times a bfloat16
  scale for each output and 64 inputs. The scale, of either sign, is the one of twelve candidates with the smallest
  squared error.
* ``lut2``, ``lut3``, ``lut4``: codes into a codebook of four, eight or sixteen bfloat16 numbers for each sixteen
  outputs (``palette.py``), which also has codebooks of integers, for models that were stored so.
* ``exact12``: bfloat16 in twelve bits, without loss (``exact.py``).
* ``grid4``, ``grid8``: a file's own codes with their scales and offsets, without loss (``grid_codes.py``).

For ``int8`` and ``q4`` the inputs are quantized too, to integers -127..127 with a scale for each group of 64, so that
one large input costs precision in its own group only. Sums of products within a group are exact integers; groups are
scaled and added in order in float32. ``multiply`` computes this in PyTorch: the native kernels are tested against it,
and it runs where there are none.

The layouts are those of the native kernels (``native/abi.h``): sixteen outputs side by side, four inputs each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import byref
from dataclasses import dataclass
from math import prod
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.errors import ConfigError, CorruptError, nearest
from vivace.kernels import exact, palette
from vivace.kernels.exact import Exact, pack_exact
from vivace.kernels.grid_codes import INPUTS, GridCodes
from vivace.kernels.library import GROUP as GROUP
from vivace.kernels.library import LANES, CQuantised, body_of, found_library, runnable
from vivace.kernels.palette import IntPalette, Palette
from vivace.kernels.threads import num_threads

Format = Literal["int8", "q4", "lut4", "lut3", "lut2", "exact12"]
Weights = Literal["bf16", "int8", "q4", "lut4", "lut3", "lut2", "exact12"]
"""Formats that the matrices of a model can be kept in; ``bf16`` keeps them as they are in the checkpoint."""

PALETTES: Mapping[str, int] = {"lut2": 2, "lut3": 3, "lut4": 4}
"""Bits of a code, by the formats with a codebook."""

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Integers that the codes of q4 stand for, the same as those of llama.cpp's IQ4_NL."""

TINY = 1e-30
"""A group whose numbers are all smaller than this is quantized to zero."""

ROWS = 256
"""Rows of a matrix that are quantized at a time, which bounds the memory of float32 copies."""


def check_weights(name: str) -> Weights:
    """Return ``name`` if it is one of ``Weights``.

    Raises:
        ConfigError: it is not; the message names the nearest.
    """
    names = get_args(Weights)
    if name not in names:
        raise ConfigError(f"weights must be {', '.join(names)}, found {name!r}{nearest(name, names)}")
    return cast(Weights, name)


@dataclass(frozen=True)
class LowBit:
    """A matrix in int8 or q4, in the layout of the native kernels."""

    format: Literal["int8", "q4"]
    codes: Tensor
    """uint8. int8: (tiles, groups, 16, 16, 4), integers plus 128. q4: (tiles, groups, 8, 16, 4), two codes a byte."""
    scales: Tensor
    """int8: (tiles * 16,) float32. q4: (tiles, groups, 16) bfloat16."""
    out_width: int
    in_width: int

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def groups(self) -> int:
        """Number of groups of inputs."""
        return self.codes.shape[1]

    def integers(self, tiles: Tensor | slice = slice(None)) -> Tensor:
        """Return the integers of some tiles, (n * 16, groups * 64) int8."""
        codes = self.codes[tiles]
        if self.format == "int8":
            plain = (codes ^ 128).view(torch.int8).permute(0, 3, 1, 2, 4)
        else:
            both = torch.stack((codes & 15, codes >> 4), 3)  # (n, groups, 8, 2, 16, 4)
            plain = _table(codes.device)[both.int()].permute(0, 4, 1, 2, 3, 5)
        return plain.reshape(len(codes) * LANES, self.groups * GROUP)

    def factors(self, tiles: Tensor | slice = slice(None)) -> Tensor:
        """Return the scales of some tiles, (n * 16, 1) for int8 or (n * 16, groups) for q4, float32."""
        if self.format == "int8":
            return self.scales.view(-1, LANES)[tiles].reshape(-1, 1)
        return self.scales[tiles].transpose(1, 2).reshape(-1, self.groups).float()

    def tiles(self, part: slice = slice(None)) -> Tensor:
        """Return the weights that some tiles stand for, (n * 16, in) float32."""
        return _scaled(self.integers(part), self.factors(part))[:, : self.in_width]

    def dense(self) -> Tensor:
        """Return the weights that the codes stand for, (out, in) float32."""
        return self.tiles()[: self.out_width]

    def rows(self, index: Tensor) -> Tensor:
        """Return some rows of ``dense``, (n,) -> (n, in) float32."""
        tiles, lanes = index // LANES, index % LANES
        each = torch.arange(len(index), device=index.device) * LANES + lanes
        found = _scaled(self.integers(tiles)[each], self.factors(tiles)[each])
        return found[:, : self.in_width]


Piece = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one of the tensors that a matrix consists of."""


def size_of(out_width: int, in_width: int, format: Weights) -> int:
    """Return the bytes of a matrix in a format; for exact12 without uncompressed steps, which depend on the weights."""
    if format == "bf16":
        return out_width * in_width * 2
    if format in PALETTES:
        return palette.num_bytes(out_width, in_width, PALETTES[format])
    if format == "exact12":
        return exact.num_bytes(out_width, in_width)
    return sum(prod(shape) * dtype.itemsize for shape, dtype in pieces_of(out_width, in_width, format))


def pieces_of(out_width: int, in_width: int, format: Weights) -> tuple[Piece, Piece]:
    """Return shape and dtype of the codes and of the scales of a matrix in int8 or q4."""
    tiles, groups = -(-out_width // LANES), -(-in_width // GROUP)
    if format == "int8":
        return ((tiles, groups, 16, LANES, 4), torch.uint8), ((tiles * LANES,), torch.float32)
    return ((tiles, groups, 8, LANES, 4), torch.uint8), ((tiles, groups, LANES), torch.bfloat16)


def _scaled(integers: Tensor, factors: Tensor) -> Tensor:
    """Multiply each group of integers (n, groups * 64) by its scale (n, 1 or groups)."""
    groups = integers.view(len(integers), -1, GROUP).float()
    return (groups * factors[:, :, None]).view(len(integers), -1)


def _table(device: torch.device) -> Tensor:
    return torch.tensor(TABLE, dtype=torch.int8, device=device)


Rounded = LowBit | Palette | IntPalette | Exact | GridCodes
"""A matrix in any of the quantized or packed formats."""


def quantise(weight: Tensor, format: Format) -> Rounded:
    """Quantize a matrix (out, in), some rows at a time.

    The scales of q4 are searched by native kernels where there are any and in PyTorch (slowly) elsewhere. The results
    can differ where two candidate scales have the same error.

    Raises:
        CorruptError: a weight is infinite or no number, which its codes would not show.
    """
    least, most = weight.aminmax()
    if not bool((most - least).isfinite()):
        shape = " x ".join(map(str, weight.shape))
        raise CorruptError(
            f"a matrix of {shape} has weights that are infinite or no numbers; the checkpoint is damaged"
        )
    if format == "exact12":
        return pack_exact(weight)
    if format in PALETTES:
        return palette.palettize(weight, PALETTES[format])
    out_width, in_width = weight.shape
    groups = -(-in_width // GROUP)
    codes, scales = (torch.empty(shape, dtype=dtype) for shape, dtype in pieces_of(out_width, in_width, format))
    round_rows = _round_int8 if format == "int8" else _round_q4
    for first in range(0, out_width, ROWS):
        rows = weight[first : first + ROWS]
        padded = F.pad(rows, (0, -in_width % GROUP, 0, -len(rows) % LANES)).contiguous()
        whole, factors = round_rows(padded)
        place = slice(first // LANES, first // LANES + len(padded) // LANES)
        if format == "int8":
            codes[place] = _tile(whole, 16) ^ 128
            scales[first : first + len(padded)] = factors
        else:
            pairs = _tile(whole, 8, 2)  # (n, groups, 8, 2, 16, 4)
            codes[place] = pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4
            scales[place] = factors.view(-1, LANES, groups).transpose(1, 2)
    return LowBit("int8" if format == "int8" else "q4", codes, scales, out_width, in_width)


def q4_of(codes: Tensor, scales: Tensor, in_width: int) -> LowBit:
    """Lay out a matrix whose codes were chosen elsewhere.

    Args:
        codes: (out, groups * 64) uint8, places in ``TABLE``.
        scales: (out, groups) bfloat16.
        in_width: number of inputs; the codes beyond it are not used.
    """
    missing = -len(codes) % LANES
    codes, scales = F.pad(codes, (0, 0, 0, missing)), F.pad(scales, (0, 0, 0, missing))
    pairs = _tile(codes, 8, 2)
    laid = scales.view(-1, LANES, scales.shape[1]).transpose(1, 2).contiguous()
    return LowBit("q4", (pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4).contiguous(), laid, len(codes) - missing, in_width)


def _tile(codes: Tensor, *steps: int) -> Tensor:
    """Arrange codes by tiles, (n * 16, groups * 64) -> (n, groups, *steps, 16, 4)."""
    split = codes.view(-1, LANES, codes.shape[1] // GROUP, *steps, 4)
    return split.permute(0, *range(2, split.dim() - 1), 1, split.dim() - 1)


def int8_of(codes: Tensor, scales: Tensor) -> LowBit:
    """Lay out a matrix whose codes were chosen elsewhere.

    Args:
        codes: (out, in) int8, none of them -128.
        scales: (out,) float32.
    """
    out_width, in_width = codes.shape
    padded = F.pad(codes, (0, -in_width % GROUP, 0, -out_width % LANES)).view(torch.uint8)
    laid = _tile(padded, 16) ^ 128
    return LowBit("int8", laid.contiguous(), F.pad(scales, (0, -out_width % LANES)), out_width, in_width)


def _round_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers (n, in), as bytes, and scales (n,) float32."""
    most = weight.float().abs().amax(1)
    scales = torch.where(most < TINY, 0.0, most / 127.0)
    inverse = torch.where(most < TINY, 0.0, torch.full_like(most, 127.0) / most)
    return (weight.float() * inverse[:, None]).round().to(torch.int8).view(torch.uint8), scales


def _round_q4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (n, in) uint8 and scales (n, groups) bfloat16."""
    weight = weight.bfloat16()
    library = found_library()
    if library is None or not runnable(library):
        return search_q4(weight)
    return native_q4(library, body_of(library), weight)


def native_q4(library: ctypes.CDLL, body: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``search_q4`` by native kernels, for a weight (n, in) bfloat16 whose width is a multiple of 64."""
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    scales = torch.empty(len(weight), weight.shape[1] // GROUP, dtype=torch.bfloat16)
    table = _table(weight.device)
    addresses = (weight.data_ptr(), table.data_ptr(), codes.data_ptr(), scales.data_ptr())
    call = CQuantised(*addresses, *weight.shape)
    library.vivace_quantise(body, num_threads(), byref(call))
    return codes, scales


RATIOS = (1.0, -1.0, 0.92, -0.92, 0.85, -0.85)
"""Initial candidates for a scale, relative to the one that maps the largest weight to the end of the table."""


def search_q4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Find codes and, for each group, the scale with the smallest squared error.

    The candidates are six initial scales, and each of them after one least-squares fit to the codes it gives.

    Args:
        weight: (n, in), the width a multiple of 64.

    Returns:
        Codes (n, in) uint8 and scales (n, groups) bfloat16.
    """
    table = _table(weight.device).float()
    groups = weight.float().view(-1, GROUP)
    most = groups.abs().amax(1, keepdim=True)
    middles = (table[1:] + table[:-1]) / 2
    best, least = torch.zeros_like(most), torch.full_like(most, torch.inf)
    for ratio in RATIOS:
        scale = ratio * most / table.abs().max()
        for _ in range(2):
            entries = table[torch.bucketize(groups / scale, middles)]
            lost = (groups - scale * entries).square().sum(1, keepdim=True)
            is_better = lost < least
            best, least = torch.where(is_better, scale, best), torch.where(is_better, lost, least)
            refit = (groups * entries).sum(1, keepdim=True) / entries.square().sum(1, keepdim=True)
            scale = torch.where(refit / scale > 1e-3, refit, scale)
    kept = torch.where(most < TINY, 0.0, best).bfloat16()
    inverse = torch.where(most < TINY, 0.0, 1 / kept.float())
    codes = torch.bucketize(groups * inverse, middles)
    return codes.to(torch.uint8).view(weight.shape), kept.view(len(weight), -1)


def prepare(x: Tensor, size: int = GROUP) -> tuple[Tensor, Tensor]:
    """Quantize rows (T, in) to integers (T, groups, size), held as float32, with scales (T, groups)."""
    groups = F.pad(x.float(), (0, -x.shape[1] % size)).view(len(x), -1, size)
    most = groups.abs().amax(2)
    inverse = torch.where(most < TINY, 0.0, torch.full_like(most, 127.0) / most)
    return (groups * inverse[:, :, None]).round(), torch.where(most < TINY, 0.0, most / 127.0)


def multiply(x: Tensor, weight: Rounded, bias: Tensor | None = None) -> Tensor:
    """Return ``x W^T + b`` as the native kernels compute it, (T, in) -> (T, out) in x's dtype.

    Sums within a group are exact in float32 (below 2^24). A group is added with a single rounding, as a fused
    multiply-add does: the product of its sum and its scale is exact in float64.
    """
    if isinstance(weight, Palette | Exact):
        return weight.multiply(x, bias)
    if isinstance(weight, GridCodes):
        taken = x if weight.order is None else x[:, weight.order]
        total = weight.products(*prepare(F.pad(taken, (0, -taken.shape[1] % GROUP)), INPUTS))
        return (total if bias is None else total + bias.float()).to(x.dtype)
    whole, scales = prepare(x)
    integers = weight.integers().view(-1, weight.groups, GROUP).permute(1, 2, 0).float()
    factors = weight.factors()
    total = torch.zeros(len(x), len(factors), device=x.device)
    for g in range(weight.groups):
        sums = (whole[:, g] @ integers[g]).double()
        scale = scales[:, g, None].expand_as(total) if weight.format == "int8" else scales[:, g, None] * factors[:, g]
        total = (total.double() + sums * scale.double()).float()
    if weight.format == "int8":
        total = total * factors[:, 0]
    total = total[:, : weight.out_width]
    return (total if bias is None else total + bias.float()).to(x.dtype)
