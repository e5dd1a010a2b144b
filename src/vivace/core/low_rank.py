"""Low-rank deltas: products of two small matrices that are added to named projections for some rows of a call.

    y[t] += up s(down x[t])        down (rank, in), up (out, rank), s the identity, or silu at a bottleneck ("mlp")

An accelerated residual, a speculative stream and a request's LoRA (Hu et al. 2021, arXiv:2106.09685) differ only in
which rows carry which factors. So ``LowRankDeltas`` travels as data in the ``Step`` and the decoder never learns whose
they are. ``LowRank`` is the one module that holds such factors while they are trained and after.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.config import ModelConfig
from vivace.core.trained import Trained
from vivace.kernels import reference as kernels

Site = tuple[int, str]
"""(layer, "q" | "k" | "v" | "o" | "gate" | "up" | "down" | "mlp")."""
Shape = tuple[int, int, int]
"""(in, rank, out) of the two factors at a site."""

ATTENTION = ("q", "k", "v", "o")
"""The projections of a layer's attention half."""
PROJECTIONS = (*ATTENTION, "gate", "up", "down")
"""Every matrix of a dense layer; "mlp" is no matrix but a bottleneck beside the whole feed-forward."""


@dataclass(frozen=True)
class LowRankDeltas:
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
            span: slice | Tensor = slice(rows[0], rows[-1] + 1)
            spans.append((adapter, span if contiguous else torch.tensor(rows, device=self.which.device)))
        return tuple(spans)

    def add(self, y: Tensor, x: Tensor, site: Site) -> None:
        """Add this site's deltas to ``y`` (T, out) in place, computed from ``x`` (T, in)."""
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

    def take(self, rows: Tensor) -> LowRankDeltas:
        """Return the same deltas for some rows of the call."""
        return LowRankDeltas(self.which[rows], self.down, self.up)

    def extended(self, num_rows: int) -> LowRankDeltas:
        """Return the same deltas for a call with ``num_rows`` further rows, which get none."""
        return LowRankDeltas(F.pad(self.which, (0, num_rows), value=-1), self.down, self.up)


class LowRank(Trained):
    """Trainable factors at named sites: down factors are random, up factors zero, so they add nothing at first."""

    def __init__(self, shapes: Mapping[Site, Shape]) -> None:
        """Make the factors of one adapter.

        Args:
            shapes: (in, rank, out) of every site, in the order in which the random factors are drawn.
        """
        super().__init__()
        self.sites = tuple(shapes)
        self.down = nn.ParameterList(random_factor(rank, wide)[None] for wide, rank, _ in shapes.values())
        self.up = nn.ParameterList(torch.zeros(1, out, rank) for _, rank, out in shapes.values())
        self._by_site = tuple(dict(zip(self.sites, factors, strict=True)) for factors in (self.down, self.up))

    def deltas(self, which: Tensor) -> LowRankDeltas:
        """Return the factors as data for a call; ``which`` (T,) is 0 on rows that carry them and -1 elsewhere."""
        down, up = self._by_site
        return LowRankDeltas(which, down, up)

    def items(self) -> Iterator[tuple[Site, Tensor, Tensor]]:
        """Yield every site with its down factor (1, rank, in) and its up factor (1, out, rank)."""
        yield from zip(self.sites, self.down, self.up, strict=True)

    def widen(self) -> None:
        """Turn the factors into float32.

        On a CPU without native kernels PyTorch multiplies matrices this small several times faster than in bfloat16.
        """
        self.down.float()
        self.up.float()


def random_factor(rank: int, wide: int) -> Tensor:
    """Draw a down factor (rank, wide) as ``torch.nn.Linear`` draws its weight (Kaiming, a = sqrt 5)."""
    weight = torch.empty(rank, wide)
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    return weight


def site_shapes(model: ModelConfig, layers: Iterable[int], ranks: Mapping[str, int]) -> dict[Site, Shape]:
    """Return the shapes of factors at some sites of some layers.

    Args:
        model: whose projections they stand beside.
        layers: numbers of the layers.
        ranks: rank by name of the site, in the order of the factors; a rank of 0 leaves the site out. Sites that a
            layer lacks ("gate" without a gated feed-forward, the three of a feed-forward in a mixture) are left out.
    """
    shapes: dict[Site, Shape] = {}
    for layer in layers:
        widths = _site_widths(model, layer)
        for site, rank in ranks.items():
            if rank and site in widths:
                wide, out = widths[site]
                shapes[layer, site] = wide, rank, out
    return shapes


def _site_widths(model: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return (in, out) of every site of a layer."""
    heads, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    widths = {"q": (model.width, heads), "k": (model.width, keys), "v": (model.width, keys), "o": (heads, model.width)}
    if not model.is_moe(layer):
        halves = ("gate", "up") if model.gated else ("up",)
        widths |= dict.fromkeys(halves, (model.width, model.ffn_width)) | {"down": (model.ffn_width, model.width)}
    return widths | {"mlp": (model.width, model.width)}
