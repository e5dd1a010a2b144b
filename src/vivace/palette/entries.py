"""Palettes whose codes stay as they are while what they stand for is trained: scales, or entries where there are none.

There is little of it, one number for 64 weights, and every weight has a gradient through it. No weight changes its
code, so none can come to rest between two of them, and what is trained is what is stored but for its last rounding.

Source: Egiazarian et al. 2024, arXiv:2401.06118 (AQLM), fine-tune codebooks, scales and norms behind fixed codes, block
by block. **Where we differ**: scales (or entries) alone, for the distribution of the whole model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vivace.kernels.coded import PaletteCodes
from vivace.kernels.library import GROUP, LANES


class TrainedEntries(nn.Module):
    """``x W^T + b`` with codes that stay; their scales are trained, or their entries where there are no scales."""

    def __init__(self, codes: PaletteCodes, bias: Tensor | None) -> None:
        """Begin at codes; ``bias`` is (out,) or None."""
        super().__init__()
        self.bias: Tensor | None
        self.register_buffer("bias", bias, persistent=False)
        self.begun = codes
        first = codes.entries if codes.scales is None else codes.scales
        self.trained = nn.Parameter(first.float().clone())
        self.unit = spacing_of(codes)
        if codes.scales is not None:
            # A scale moves its weights in proportion to their entries.
            size = float(codes.entries.float().square().mean().sqrt())
            self.unit *= float(codes.scales.float().abs().mean()) / max(size, 1e-12)

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Project rows, (T, in) -> (T, out), and add ``add`` (T, out) if it is given."""
        if torch.is_grad_enabled():
            weight: Tensor = _Decoded.apply(self.trained, self.begun)  # type: ignore[no-untyped-call]
        else:
            weight = self.codes().dense()
        y = F.linear(x, weight, self.bias)
        return y if add is None else add + y

    @torch.no_grad()
    def codes(self) -> PaletteCodes:
        """Return the codes with entries and scales as they are stored."""
        stored = self.trained.detach().bfloat16()
        if self.begun.scales is not None:
            return PaletteCodes(self.begun.codes, self.begun.entries, stored)
        return PaletteCodes(self.begun.codes, stored)

    def settle(self) -> None:
        """Do nothing: all is in the parameters."""


class _Decoded(torch.autograd.Function):
    """Weights (out, in) of codes, given their scales (out, groups) or their entries (tiles, 2^bits); keeps nothing."""

    @staticmethod
    def forward(ctx: Any, trained: Tensor, begun: PaletteCodes) -> Tensor:
        """Return the weights."""
        ctx.begun = begun
        if begun.scales is None:
            return PaletteCodes(begun.codes, trained).dense()
        return PaletteCodes(begun.codes, begun.entries, trained).dense()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of what is trained."""
        begun = ctx.begun
        if begun.scales is not None:
            products = given * PaletteCodes(begun.codes, begun.entries.float()).dense()
            padded = F.pad(products, (0, -products.shape[1] % GROUP))
            return padded.view(len(padded), -1, GROUP).sum(2), None
        tiles, entries = begun.entries.shape
        missing = (0, 0, 0, -len(given) % LANES)
        places = F.pad(begun.codes, missing).view(tiles, -1)
        values = F.pad(given, missing).view(tiles, -1)
        sums = [torch.where(places == entry, values, 0.0).sum(1) for entry in range(entries)]
        return torch.stack(sums, 1), None


def spacing_of(codes: PaletteCodes) -> float:
    """Return the mean distance of neighbouring entries."""
    return float(codes.entries.float().diff(dim=1).mean())
