"""Adapters as data: low-rank terms added to named projections, for some rows of a call.

An accelerated residual, a speculative stream and a request's LoRA differ only in which rows carry which
terms, so they travel in the ``Step`` and the decoder never learns their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.kernels import reference as kernels

Site = tuple[int, str]
"""(layer, "q" | "k" | "v" | "o" | "gate" | "up" | "down" | "mlp")."""


@dataclass(frozen=True)
class Deltas:
    """``y[t] += up[a] s(down[a] x[t])`` with a = which[t]; s is silu at "mlp", the identity elsewhere.

    A row with ``which == -1`` is left alone, bit for bit: nothing is added to it, not even zero.
    """

    which: Tensor
    """(T,) adapter of each row, -1 for none."""
    down: Mapping[Site, Tensor]
    """Site -> (A, rank, in), A adapters; PyTorch takes them in any precision, native spans in the rows' own."""
    up: Mapping[Site, Tensor]
    """Site -> (A, out, rank), scale folded in."""

    @cached_property
    def spans(self) -> tuple[tuple[int, slice | Tensor], ...]:
        """(adapter, its rows), rows as a slice when they are neighbours."""
        which = self.which.tolist()
        spans: list[tuple[int, slice | Tensor]] = []
        for adapter in sorted(set(which) - {-1}):
            rows = [row for row, other in enumerate(which) if other == adapter]
            contiguous = rows[-1] - rows[0] + 1 == len(rows)
            spans.append((adapter, slice(rows[0], rows[-1] + 1) if contiguous else torch.tensor(rows)))
        return tuple(spans)

    def add(self, y: Tensor, x: Tensor, site: Site) -> None:
        """Add this site's terms to ``y`` (T, out) in place, computed from ``x`` (T, in)."""
        down = self.down.get(site)
        if down is None:
            return
        up = self.up[site]
        for adapter, rows in self.spans:
            inner = kernels.linear(x[rows].to(down.dtype), down[adapter])
            if site[1] == "mlp":
                inner = kernels.pointwise(F.silu, inner)
            term = kernels.linear(inner, up[adapter]).to(y.dtype)
            if isinstance(rows, slice):
                y[rows].add_(term)
            else:
                y.index_add_(0, rows, term)

    def take(self, rows: Tensor) -> Deltas:
        """The same terms for some rows of the call."""
        return Deltas(self.which[rows], self.down, self.up)

    def extended(self, num_rows: int) -> Deltas:
        """The same terms in a call with ``num_rows`` further rows, which get none."""
        return Deltas(F.pad(self.which, (0, num_rows), value=-1), self.down, self.up)
