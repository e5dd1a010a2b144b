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
        self.integers: Tensor | None
        self.places: Tensor
        self.entries: Tensor
        has_scales = codes.scales is not None
        chosen = PaletteCodes(codes.codes, codes.entries.float()).dense(torch.int8) if has_scales else None
        buffers = {"bias": bias, "places": codes.codes, "entries": codes.entries, "integers": chosen}
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)
        first = codes.entries if codes.scales is None else codes.scales
        self.trained = nn.Parameter(first.float().clone())
        self.unit = spacing_of(codes)
        if codes.scales is not None:
            # A scale moves its weights in proportion to their entries.
            size = float(codes.entries.float().square().mean().sqrt())
            self.unit *= float(codes.scales.float().abs().mean()) / max(size, 1e-12)

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Project rows, (T, in) -> (T, out), and add ``add`` (T, out) if it is given."""
        weight: Tensor
        if not torch.is_grad_enabled():
            weight = self.codes().dense()
        elif self.integers is None:
            weight = _Chosen.apply(self.trained, self.places)  # type: ignore[no-untyped-call]
        else:
            weight = _Scaled.apply(self.trained, self.integers)  # type: ignore[no-untyped-call]
        y = F.linear(x, weight, self.bias)
        return y if add is None else add + y

    @torch.no_grad()
    def codes(self) -> PaletteCodes:
        """Return the codes with entries and scales as they are stored."""
        stored = self.trained.detach().bfloat16()
        if self.integers is not None:
            return PaletteCodes(self.places, self.entries, stored)
        return PaletteCodes(self.places, stored)

    def settle(self) -> None:
        """Do nothing: all is in the parameters."""


class _Scaled(torch.autograd.Function):
    """Integers (out, in) times scales (out, groups), of which only the scales have gradients; nothing else is kept."""

    @staticmethod
    def forward(ctx: Any, scales: Tensor, integers: Tensor) -> Tensor:
        """Return the weights (out, in)."""
        ctx.integers = integers
        return integers.float().mul_(scales.repeat_interleave(GROUP, 1)[:, : integers.shape[1]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the scales."""
        products = ctx.integers.float().mul_(given)
        padded = F.pad(products, (0, -products.shape[1] % GROUP))
        return padded.view(len(padded), -1, GROUP).sum(2), None


class _Chosen(torch.autograd.Function):
    """Entries (tiles, 2^bits) that codes (out, in) choose; nothing but the codes is kept."""

    @staticmethod
    def forward(ctx: Any, entries: Tensor, codes: Tensor) -> Tensor:
        """Return the weights (out, in)."""
        ctx.codes, ctx.shape = codes, entries.shape
        return PaletteCodes(codes, entries).dense()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the entries."""
        tiles, count = ctx.shape
        missing = (0, 0, 0, -len(given) % LANES)
        places, values = (F.pad(each, missing).view(tiles, -1) for each in (ctx.codes, given))
        sums = [torch.where(places == entry, values, 0.0).sum(1) for entry in range(count)]
        return torch.stack(sums, 1), None


def spacing_of(codes: PaletteCodes) -> float:
    """Return the mean distance of neighbouring entries."""
    return float(codes.entries.float().diff(dim=1).mean())
