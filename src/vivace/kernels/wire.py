"""Rows in four bits, as ranks send them to be added, and their sums: native code, and the reference that checks it.

After Dong et al. 2024, *Towards Low-bit Communication for Tensor Parallel LLM Inference* (arXiv:2411.07942): a fixed
set of features with large ranges is sent in bfloat16, every other feature as a code of four bits whose step is
calibrated for each rank and feature and is not sent.

    code = clamp(round(x / (f s_j)), -8, 7)            x' = code s_j f

**Where we differ**: with ``has_factors`` each row sends one byte that stands for a factor f of all its steps, one of
256 in a geometric series. Of the eight largest that could be of use it is the one with the least squared error. Rows
differ in size by an order of magnitude, which steps that never change cannot follow.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.kernels.library import LANES, CWireCode, CWireRows, found_library

FACTORS = torch.tensor([2.0 ** ((code - 160) / 8) for code in range(256)], dtype=torch.float32)
"""What the byte of a row stands for."""
INVERSE_FACTORS = (1 / FACTORS.double()).float()
TRIED = 8
"""Factors of a row that are tried, from the smallest that clips nothing downwards: to .55 of it."""
REACH = 7.5
"""The largest multiple of a step that no code clips."""
LEAST_STEP = 1e-8
"""Smallest step, that of a feature that never was anything but zero."""


@dataclass(frozen=True, eq=False)
class WireCode:
    """How the rows of one sum travel."""

    keep: Tensor
    """(k,) int64, ascending: features that are sent in bfloat16."""
    rest: Tensor
    """(n,) int64, ascending: the others; n is even."""
    scales: Tensor
    """(R + 1, n) float32: step of each feature of each rank, and of the sum over ranks."""
    has_factors: bool
    """Whether each row has a factor of its own."""

    def __post_init__(self) -> None:
        assert len(self.rest) % 2 == 0, "codes are packed two to a byte"
        assert self.scales.shape[1] == len(self.rest), "every coded feature has a step"

    @property
    def width(self) -> int:
        """Number of features of a row."""
        return len(self.keep) + len(self.rest)

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row on the wire."""
        return int(self.has_factors) + len(self.rest) // 2 + 2 * len(self.keep)

    @cached_property
    def inverses(self) -> Tensor:
        """One over the steps, (R + 1, n)."""
        return 1 / self.scales

    @cached_property
    def weights(self) -> Tensor:
        """Squares of the steps, padded with zeros to whole vectors, (R + 1, padded)."""
        return F.pad(self.scales * self.scales, (0, -len(self.rest) % LANES)).contiguous()

    def encode(self, x: Tensor, source: int) -> tuple[Tensor, int]:
        """Return what is sent for rows (T, E), (T, row_bytes) uint8, and how many features were clipped.

        Args:
            x: rows in bfloat16 or float32.
            source: the rank whose steps are used; R is the sum.
        """
        library = found_library()
        if library is None or x.dtype not in (torch.bfloat16, torch.float32):
            return self.reference_encode(x, source)
        x = x.contiguous()
        payload = torch.empty(len(x), self.row_bytes, dtype=torch.uint8)
        clipped = ctypes.c_int64(0)
        library.vivace_wire_encode(self._rows(x, payload, len(x), source), ctypes.byref(clipped))
        return payload, clipped.value

    def add(self, payloads: Sequence[Tensor], source: int = 0) -> Tensor:
        """Return the sum (T, E) float32 of the rows that payloads stand for, from rank ``source`` on."""
        library = found_library()
        if library is None:
            return self.reference_add(payloads, source)
        count = len(payloads[0])
        sums = torch.empty(count, self.width, dtype=torch.float32)
        places = (ctypes.c_void_p * len(payloads))(*(payload.data_ptr() for payload in payloads))
        library.vivace_wire_add(self._rows(None, None, count, source), places, len(payloads), sums.data_ptr())
        return sums

    def reference_encode(self, x: Tensor, source: int) -> tuple[Tensor, int]:
        """Compute ``encode`` with PyTorch, in the order of the native code."""
        y = x[:, self.rest].float() * self.inverses[source]
        inverse = torch.ones(len(x), 1)
        parts = []
        if self.has_factors:
            best = self._best_factors(y, self.weights[source])
            inverse = INVERSE_FACTORS[best][:, None]
            parts.append(best.to(torch.uint8)[:, None])
        scaled = y * inverse
        codes = (scaled.clamp(-8, 7).round() + 8).to(torch.uint8)
        halves = x[:, self.keep].bfloat16().contiguous().view(torch.uint8).view(len(x), -1)
        parts += [codes[:, : codes.shape[1] // 2] | codes[:, codes.shape[1] // 2 :] << 4, halves]
        return torch.cat(parts, 1), int(((scaled < -8.5) | (scaled > REACH)).sum())

    def reference_add(self, payloads: Sequence[Tensor], source: int = 0) -> Tensor:
        """Compute ``add`` with PyTorch, in the order of the native code."""
        count, head, tail = len(payloads[0]), int(self.has_factors), self.row_bytes - 2 * len(self.keep)
        rest, keep = torch.zeros(count, len(self.rest)), torch.zeros(count, len(self.keep))
        for rank, payload in enumerate(payloads, source):
            packed = payload[:, head:tail]
            codes = torch.cat((packed & 15, packed >> 4), 1).float() - 8
            factor = FACTORS[payload[:, 0].long()][:, None] if head else torch.ones(count, 1)
            rest += (codes * self.scales[rank]) * factor
            halves = payload[:, tail:].reshape(-1).clone().view(torch.bfloat16)
            keep += halves.view(count, len(self.keep)).float()
        sums = torch.empty(count, self.width)
        sums[:, self.rest], sums[:, self.keep] = rest, keep
        return sums

    def _best_factors(self, y: Tensor, weight: Tensor) -> Tensor:
        """Return the byte of each row (T,), the one with the least squared error."""
        y = F.pad(y, (0, len(weight) - y.shape[1]))
        top = torch.searchsorted(FACTORS * REACH, y.abs().amax(1) if y.shape[1] else y.new_zeros(len(y)))
        top = top.clamp(max=255)
        least, best = torch.full((len(y),), torch.inf), top.clone()
        for step in range(TRIED):
            at = (top - step).clamp(min=0)
            scaled = y * INVERSE_FACTORS[at][:, None]
            error = y - scaled.clamp(-8, 7).round() * FACTORS[at][:, None]
            loss = _by_lanes(weight * (error * error))
            is_less = (loss < least) & (top >= step)
            least, best = torch.where(is_less, loss, least), torch.where(is_less, at, best)
        return best

    def _rows(self, x: Tensor | None, payload: Tensor | None, count: int, source: int) -> ctypes.Array[CWireRows]:
        """Return the arguments of a native call."""
        is_float = x is not None and x.dtype == torch.float32
        places = [None if part is None else part.data_ptr() for part in (x, payload)]
        return (CWireRows * 1)(CWireRows(ctypes.pointer(self._described), *places, count, is_float, source))

    @cached_property
    def _described(self) -> CWireCode:
        held = [self.keep.int(), self.rest.int(), self.scales.contiguous(), self.inverses.contiguous(), self.weights]
        factors = [FACTORS, INVERSE_FACTORS] if self.has_factors else []
        places = [part.data_ptr() for part in (*held, *factors)] + [None] * (2 - len(factors))
        found = CWireCode(*places, self.width, len(self.keep), len(self.rest), self.row_bytes)
        found.held = held  # the memory that it points to
        return found


def _by_lanes(terms: Tensor) -> Tensor:
    """Return sums of rows (T, padded) over vectors first and lanes afterwards, one addition after the other."""
    total = torch.zeros(len(terms))
    if not terms.shape[1]:
        return total
    vectors = terms.view(len(terms), -1, LANES)
    lanes = torch.zeros(len(terms), LANES)
    for place in range(vectors.shape[1]):
        lanes = lanes + vectors[:, place]
    for lane in range(LANES):
        total = total + lanes[:, lane]
    return total
