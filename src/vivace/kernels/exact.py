"""bfloat16 weights in twelve bits without loss (``exact12``): the upper byte of each weight is replaced by a code.

The upper byte of a bfloat16 holds its sign and all bits of its exponent except the last. The weights of a matrix spread
over a few powers of two, so nearly all of them have one of sixteen upper bytes: both signs of sixteen neighbouring
exponents. The lower byte is stored as it is, and a code of four bits selects one of the sixteen upper bytes that are
most frequent in the matrix. A step (4 x 32 weights) that contains any other upper byte is stored uncompressed; with
normally distributed weights that is one step in a hundred. Every weight is restored bit for bit, and products are
summed in the order of the dense formats.

Related work codes the exponents of trained weights with variable length, for transport (M. Hershcovitch et al.,
*ZipNN*, 2024, arXiv:2411.05239) and for GPUs (T. Zhang et al., *DFloat11*, 2025, arXiv:2504.11651), which comes nearer
to their entropy of about three bits. **Where we differ**: codes of a fixed length take about one bit more, and one byte
shuffle in a register decodes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.kernels.library import LANES
from vivace.kernels.reference import linear

CODES = 16
"""Number of upper bytes that have a code."""
WIDTH = 32
"""Weights in one tile of a step: two inputs of sixteen outputs, or 32 inputs of one output."""
TILES = 4
"""Tiles of a step."""
PLANES = 3
"""Parts of a group: the lower bytes of two tiles of every step, those of the other two, and the codes of all four."""
PLANE_BYTES = TILES * WIDTH // 2
"""Bytes of one step in a plane."""
HEAD_BYTES = 64
"""Bytes before the uncompressed steps in ``side``: the upper bytes and the number of these steps (``ExactSide`` in
``native/abi.h``)."""
BLOCK = 1 << 20
"""Weights that are packed at a time, which bounds the memory of wider intermediate values."""


@dataclass(frozen=True)
class Exact:
    """A matrix in twelve bits, in the layout of the native kernels."""

    format: Literal["exact12", "exact12_rows"]
    """Which dense format's order of sums is kept: tiles of sixteen outputs, or row-major (``exact12_rows``)."""
    codes: Tensor
    """(groups, 3, steps, 64) uint8: lower bytes of two tiles, of the other two tiles, and codes of all four."""
    side: Tensor
    """uint8: the sixteen upper bytes, the last tiles of uncompressed steps, and the indices of those steps."""
    out_width: int
    in_width: int

    @property
    def scales(self) -> Tensor:
        """The bytes beside the codes, under the name that all formats have for them."""
        return self.side

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and of ``side``."""
        return self.codes.nbytes + self.side.nbytes

    @property
    def num_whole(self) -> int:
        """Number of steps that are stored uncompressed."""
        return int(self.side[CODES : CODES + 8].view(torch.int64))

    def dense(self) -> Tensor:
        """Restore the weights, (out, in) bfloat16."""
        return self._weights(torch.arange(len(self.codes)))[: self.out_width, : self.in_width]

    def rows(self, index: Tensor) -> Tensor:
        """Restore some rows of the matrix, (n,) -> (n, in) bfloat16."""
        outputs = self._outputs
        each = torch.arange(len(index)) * outputs + index % outputs
        return self._weights(index // outputs)[each, : self.in_width]

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x W^T + b`` in x's dtype, (T, in) -> (T, out); a row's bits do not depend on other rows."""
        return linear(x, self.dense().to(x.dtype), None if bias is None else bias.to(x.dtype))

    @property
    def _outputs(self) -> int:
        """Number of outputs of a group."""
        return TILES * (LANES if self.format == "exact12" else 1)

    def _weights(self, groups: Tensor) -> Tensor:
        """Restore some groups, (n,) -> (n * outputs, inputs) bfloat16."""
        found = _join(self.codes[groups], self.side[:CODES])
        last, starts, places = self._whole()
        for at, group in enumerate(groups.tolist() if len(places) else ()):
            first, stop = int(starts[group]), int(starts[group + 1])
            if first < stop:
                steps = places[first:stop].long()
                parts = self.codes[group, :, steps].transpose(0, 1).contiguous().view(torch.bfloat16)
                found[at, steps] = torch.cat((parts, last[first:stop, None]), 1)
        return _rows_of(found, self.format)

    def _whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the last tiles of uncompressed steps, where each group's start among them, and their step indices."""
        count, groups = self.num_whole, len(self.codes)
        stop = HEAD_BYTES + count * 2 * WIDTH
        places = self.side[stop:].view(torch.int32)
        starts = places[: groups + 1] - (groups + 1)
        return self.side[HEAD_BYTES:stop].view(torch.bfloat16).view(count, WIDTH), starts, places[groups + 1 :]


def pack_exact(weight: Tensor, format: Literal["exact12", "exact12_rows"] = "exact12") -> Exact:
    """Pack a bfloat16 matrix (out, in) into twelve bits per weight, some outputs at a time."""
    assert weight.dtype == torch.bfloat16
    out_width, in_width = weight.shape
    outputs, steps = (TILES * LANES, -(-in_width // 2)) if format == "exact12" else (TILES, -(-in_width // WIDTH))
    groups = -(-out_width // outputs)
    size = max(1, BLOCK // (outputs * in_width)) * outputs
    blocks = range(0, out_width, size)
    counts = sum(torch.bincount(_bytes(weight[at : at + size])[1].flatten(), minlength=256) for at in blocks)
    assert isinstance(counts, Tensor)
    upper = counts.topk(CODES).indices
    code_of = torch.full((256,), CODES, dtype=torch.uint8)
    code_of[upper] = torch.arange(CODES, dtype=torch.uint8)
    codes = torch.empty(groups, PLANES, steps, PLANE_BYTES, dtype=torch.uint8)
    is_whole = torch.empty(groups, steps, dtype=torch.bool)
    last = [weight.new_empty(0, WIDTH)]
    for at in blocks:
        laid = _steps_of(weight[at : at + size], format)
        lower, high = _bytes(laid)
        chosen = code_of[high.int()]
        part = slice(at // outputs, at // outputs + len(laid))
        codes[part] = _planes(lower, chosen)
        is_whole[part] = whole = (chosen == CODES).flatten(2).any(2)
        found = laid[whole]
        codes[part].transpose(1, 2)[whole] = found[:, :PLANES].view(torch.uint8)
        last.append(found[:, PLANES])
    return Exact(format, codes, _side(upper, torch.cat(last), is_whole), out_width, in_width)


def num_bytes(out_width: int, in_width: int) -> int:
    """Return the bytes of a matrix in the tiled layout, none of whose steps is stored uncompressed."""
    groups, steps = -(-out_width // (TILES * LANES)), -(-in_width // 2)
    return groups * PLANES * steps * PLANE_BYTES + HEAD_BYTES + (groups + 1) * 4


def _side(upper: Tensor, last: Tensor, is_whole: Tensor) -> Tensor:
    groups = len(is_whole)
    head = torch.zeros(HEAD_BYTES, dtype=torch.uint8)
    head[:CODES] = upper.to(torch.uint8)
    head[CODES : CODES + 8] = torch.tensor([len(last)]).view(torch.uint8)
    starts = F.pad(is_whole.sum(1).cumsum(0), (1, 0)) + groups + 1
    places = torch.cat((starts, is_whole.nonzero()[:, 1])).int()
    return torch.cat((head, last.contiguous().view(torch.uint8).flatten(), places.view(torch.uint8)))


def _bytes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Split bfloat16 numbers into their lower and upper bytes."""
    lower, upper = weight.contiguous().view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return lower, upper


def _steps_of(weight: Tensor, format: str) -> Tensor:
    """Arrange a matrix by steps, (out, in) -> (groups, steps, 4, 32), padded with zeros."""
    if format == "exact12":
        padded = F.pad(weight, (0, weight.shape[1] % 2, 0, -len(weight) % (TILES * LANES)))
        split = padded.view(-1, TILES, LANES, padded.shape[1] // 2, 2).permute(0, 3, 1, 2, 4)
        return split.reshape(len(split), -1, TILES, WIDTH)
    padded = F.pad(weight, (0, -weight.shape[1] % WIDTH, 0, -len(weight) % TILES))
    return padded.view(-1, TILES, padded.shape[1] // WIDTH, WIDTH).transpose(1, 2).contiguous()


def _rows_of(laid: Tensor, format: str) -> Tensor:
    """Arrange steps as rows, the inverse of ``_steps_of``, with its padding left in place."""
    if format == "exact12":
        split = laid.view(*laid.shape[:3], LANES, 2).permute(0, 2, 3, 1, 4)
        return split.reshape(len(laid) * TILES * LANES, -1)
    return laid.transpose(1, 2).reshape(len(laid) * TILES, -1)


def _planes(lower: Tensor, codes: Tensor) -> Tensor:
    """Pack lower bytes and codes into planes, (n, steps, 4, 32) each -> (n, 3, steps, 64)."""
    places = _interleave(codes)
    both = places[:, :, 0] | places[:, :, 1] << 4
    return torch.cat((_interleave(lower).transpose(1, 2), both[:, None]), 1)


def _join(codes: Tensor, upper: Tensor) -> Tensor:
    """Unpack planes, with upper bytes in the place of codes: (n, 3, steps, 64) -> (n, steps, 4, 32) bfloat16."""
    both = codes[:, 2]
    high = upper[torch.stack((both & 15, both >> 4), 1).int()]
    whole: Tensor = torch.stack((codes[:, :2], high), -1).unflatten(3, (4, 2, 8))  # (n, 2, steps, 4, 2, 8, 2)
    return whole.permute(0, 2, 1, 4, 3, 5, 6).reshape(len(codes), codes.shape[2], TILES, -1).view(torch.bfloat16)


def _interleave(tiles: Tensor) -> Tensor:
    """Alternate eight bytes of one tile with eight of the next, (n, steps, 4, 32) -> (n, steps, 2, 64).

    That is the order in which the native kernels' byte interleaving, which works on 128-bit lanes, restores 64 bytes of
    weights of either tile.
    """
    return tiles.view(*tiles.shape[:2], 2, 2, 4, 8).transpose(3, 4).reshape(*tiles.shape[:2], 2, -1)
