"""Weights in twelve bits without loss (``exact12``): bfloat16 whose upper bytes are codes.

A bfloat16's upper byte is its sign and all of its exponent but the last bit. Weights spread over some powers of two, so
nearly all of a matrix have one of sixteen upper bytes: both signs of sixteen neighbouring exponents. The lower byte
stays, and four bits choose among the sixteen upper bytes that are the most frequent. A step, 4 x 32 weights, with any
other is kept whole: one in a hundred of a normal distribution. Every weight comes back bit for bit, and products are
summed in the order of the dense formats.

Exponents of trained weights were coded by variable lengths for transport (M. Hershcovitch et al., *ZipNN*, 2024,
arXiv:2411.05239) and for GPUs (T. Zhang et al., *DFloat11*, 2025, arXiv:2504.11651), nearer to their entropy of about
three bits. A fixed length costs a bit more, and one byte shuffle in registers undoes it.
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
WIDTH = 32
"""Weights side by side in a tile of a step: a pair of inputs of sixteen outputs, or 32 inputs of one."""
TILES = 4
PLANES = 3
"""Of a group, each with half of a step's weights or all of its codes."""
PLANE_BYTES = TILES * WIDTH // 2
"""Of a step."""
HEAD_BYTES = 64
"""Of the upper bytes and the number of whole steps; what is kept of these follows (``ExactSide``, ``native/abi.h``)."""
BLOCK = 1 << 20
"""Weights that are looked at together: what is held of them in more bytes stays small."""


@dataclass(frozen=True)
class Exact:
    """A matrix in twelve bits, as the native bodies read it."""

    format: Literal["exact12", "exact12_rows"]
    """Summed as tiles of sixteen outputs are, or as outputs whose weights lie in a row."""
    codes: Tensor
    """(groups, 3, steps, 64) uint8: lower bytes of two tiles, of the other two, and codes of all."""
    side: Tensor
    """uint8: upper bytes, the last tiles of whole steps, and which steps those are."""
    out_width: int
    in_width: int

    @property
    def scales(self) -> Tensor:
        """What belongs to the codes."""
        return self.side

    @property
    def nbytes(self) -> int:
        """Of codes and what belongs to them."""
        return self.codes.nbytes + self.side.nbytes

    @property
    def num_whole(self) -> int:
        """Steps that are kept as they were."""
        return int(self.side[CODES : CODES + 8].view(torch.int64))

    def dense(self) -> Tensor:
        """(out, in) bfloat16: the weights."""
        return self._weights(torch.arange(len(self.codes)))[: self.out_width, : self.in_width]

    def rows(self, index: Tensor) -> Tensor:
        """Some rows of ``dense``, (n,) -> (n, in)."""
        outputs = self._outputs
        each = torch.arange(len(index)) * outputs + index % outputs
        return self._weights(index // outputs)[each, : self.in_width]

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x W^T + b`` in x's dtype, (T, in) -> (T, out), a row's bits its own."""
        return linear(x, self.dense().to(x.dtype), None if bias is None else bias.to(x.dtype))

    @property
    def _outputs(self) -> int:
        """Of a group."""
        return TILES * (LANES if self.format == "exact12" else 1)

    def _weights(self, groups: Tensor) -> Tensor:
        """(n,) -> (n * outputs, inputs) bfloat16."""
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
        """Last tiles of whole steps, where each group's begin among them, and which steps they are."""
        count, groups = self.num_whole, len(self.codes)
        stop = HEAD_BYTES + count * 2 * WIDTH
        places = self.side[stop:].view(torch.int32)
        starts = places[: groups + 1] - (groups + 1)
        return self.side[HEAD_BYTES:stop].view(torch.bfloat16).view(count, WIDTH), starts, places[groups + 1 :]


def pack_exact(weight: Tensor, format: Literal["exact12", "exact12_rows"] = "exact12") -> Exact:
    """Lay a bfloat16 matrix (out, in) in twelve bits, some outputs at a time."""
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
    """Of a matrix without whole steps, 4 x 32 weights in tiles."""
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
    """Lower and upper bytes of bfloat16."""
    lower, upper = weight.contiguous().view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return lower, upper


def _steps_of(weight: Tensor, format: str) -> Tensor:
    """(out, in) -> (groups, steps, 4, 32), zeros where it ends."""
    if format == "exact12":
        padded = F.pad(weight, (0, weight.shape[1] % 2, 0, -len(weight) % (TILES * LANES)))
        split = padded.view(-1, TILES, LANES, padded.shape[1] // 2, 2).permute(0, 3, 1, 2, 4)
        return split.reshape(len(split), -1, TILES, WIDTH)
    padded = F.pad(weight, (0, -weight.shape[1] % WIDTH, 0, -len(weight) % TILES))
    return padded.view(-1, TILES, padded.shape[1] // WIDTH, WIDTH).transpose(1, 2).contiguous()


def _rows_of(laid: Tensor, format: str) -> Tensor:
    """``_steps_of`` undone, but for the zeros."""
    if format == "exact12":
        split = laid.view(*laid.shape[:3], LANES, 2).permute(0, 2, 3, 1, 4)
        return split.reshape(len(laid) * TILES * LANES, -1)
    return laid.transpose(1, 2).reshape(len(laid) * TILES, -1)


def _planes(lower: Tensor, codes: Tensor) -> Tensor:
    """Lower bytes and codes, (n, steps, 4, 32) each -> (n, 3, steps, 64)."""
    places = _interleave(codes)
    both = places[:, :, 0] | places[:, :, 1] << 4
    return torch.cat((_interleave(lower).transpose(1, 2), both[:, None]), 1)


def _join(codes: Tensor, upper: Tensor) -> Tensor:
    """``_planes`` undone, with upper bytes for codes: (n, 3, steps, 64) -> (n, steps, 4, 32) bfloat16."""
    both = codes[:, 2]
    high = upper[torch.stack((both & 15, both >> 4), 1).int()]
    whole: Tensor = torch.stack((codes[:, :2], high), -1).unflatten(3, (4, 2, 8))  # (n, 2, steps, 4, 2, 8, 2)
    return whole.permute(0, 2, 1, 4, 3, 5, 6).reshape(len(codes), codes.shape[2], TILES, -1).view(torch.bfloat16)


def _interleave(tiles: Tensor) -> Tensor:
    """(n, steps, 4, 32) -> (n, steps, 2, 64): eight of one tile and eight of the next in turn."""
    return tiles.view(*tiles.shape[:2], 2, 2, 4, 8).transpose(3, 4).reshape(*tiles.shape[:2], 2, -1)
