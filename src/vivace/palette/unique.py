"""The same clustering with its own backward pass, which keeps the centroids of each round and nothing else.

Plain autograd keeps several maps (n, K) of every round. Here the map is made again on the way back, some weights at a
time, from the weights and from the centroids of the round, of which there are a few for each tile.

With one palette for a whole matrix of bfloat16 numbers there is less to compute, too: the matrix has at most 65,536
different values, and everything but the incoming gradient depends on a weight's value alone. Forward and backward then
run over values u with their counts m_u, ``c_j = sum_u m_u A_uj u / sum_u m_u A_uj``. A tile of sixteen rows has too few
weights for that to pay. Tiles of float32 weights are clustered by native kernels where there are any
(``kernels/clusters.py``); what is written here is also their oracle.

With g_i = dL/dW'_i of every weight, and f the map from a value to its clustered value at the last centroids C:

    dL/dw_i = g_i f'(w_i) + s(w_i),    dL/dC_j = sum_i g_i A_ij + ...    (and through the maps, round by round)

where s(u) is the gradient that reaches one weight of value u through the centroids. Equal weights share s, and not g.

Source: Cho et al. 2024, arXiv:2309.00964 (eDKM). **Where we differ**: eDKM keeps a table of the distinct rows of each
map, as ``hooks.py`` does; the map itself need not be kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vivace.kernels.clusters import clusters_natively, soft_clusters, soft_clusters_gradient
from vivace.palette.dkm import LEAST

AT_ONCE = 1 << 16
"""Elements of a map that are made at a time, a few of which fit into the cache of a core."""

Place = tuple[slice, slice]
"""Some tiles, and some of their weights."""


def dkm_in_parts(weights: Tensor, centroids: Tensor, tau: Tensor, rounds: int = 3) -> tuple[Tensor, Tensor]:
    """Compute ``dkm.dkm`` in little memory; the result is that of another order of sums.

    Args:
        weights: (G, n), float64, float32 or bfloat16; the arithmetic is float32 or better.
        centroids: (G, K) to begin with; they get no gradient.
        tau: (G,) temperatures.
        rounds: number of updates of the centroids.

    Returns:
        Clustered weights (G, n) in the dtype of the weights, and the last centroids (G, K), detached.
    """
    way = _Native if clusters_natively(weights, centroids.shape[1]) else _Clustered
    out, last = way.apply(weights, centroids, tau, rounds)  # type: ignore[no-untyped-call]
    return out, last


class _Native(torch.autograd.Function):
    """Soft clustering of tiles of float32 weights by native kernels."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, centroids: Tensor, tau: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
        """Return clustered weights (G, n) and the last centroids (G, K)."""
        out, each, totals = soft_clusters(weights, centroids, tau, rounds)
        ctx.save_for_backward(weights, tau, each, totals)
        last = each[-1].clone()
        ctx.mark_non_differentiable(last)
        return out, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the weights."""
        weights, tau, each, totals = ctx.saved_tensors
        return soft_clusters_gradient(weights, tau, each, totals, given), None, None, None


class _Clustered(torch.autograd.Function):
    """Soft clustering of tiles."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, centroids: Tensor, tau: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
        """Return clustered weights (G, n) and the last centroids (G, K)."""
        values, counts, index = _values(weights)
        each, totals = [centroids], []
        for _ in range(rounds):
            total, sums = torch.zeros_like(centroids), torch.zeros_like(centroids)
            for (tiles, some), w, c, t in _parts(values, each[-1], tau):
                shares = _map(_distances(w, c), t)[1]
                m = torch.ones_like(w) if counts is None else counts[some].expand_as(w)
                total[tiles] += _over_weights(shares, m)
                sums[tiles] += _over_weights(shares, m * w)
            totals.append(total)
            each.append(sums / total)
        out = torch.empty_like(values)
        for place, w, c, t in _parts(values, each[-1], tau):
            out[place] = _over_entries(c, _map(_distances(w, c), t)[1])
        ctx.save_for_backward(weights, tau, *each, *totals)
        last = each[-1].clone()
        ctx.mark_non_differentiable(last)
        return (out if index is None else out[:, index]).to(weights.dtype), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the weights."""
        weights, tau, *kept = ctx.saved_tensors
        each, totals = kept[: len(kept) // 2 + 1], kept[len(kept) // 2 + 1 :]
        values, counts, index = _values(weights)
        given = given.to(values.dtype)
        together = given if index is None else torch.zeros_like(values).index_add_(1, index, given)
        slope, shared, through = torch.empty_like(values), torch.zeros_like(values), torch.zeros_like(each[-1])
        for place, w, c, t in _parts(values, each[-1], tau):
            gaps = _distances(w, c)
            soft, shares = _map(gaps, t)
            moved = _through_map(gaps, t, soft, c[:, :, None].expand_as(soft))  # times g where the map's gradient is
            slope[place] = moved.sum(1)
            through[place[0]] += _over_weights(shares.sub_(moved), together[place])
        for before, after, total in zip(reversed(each[:-1]), reversed(each[1:]), reversed(totals), strict=True):
            onward = torch.zeros_like(before)
            for (tiles, some), w, c, t in _parts(values, before, tau):
                gaps = _distances(w, c)
                soft, shares = _map(gaps, t)
                pull = (through / total)[tiles]
                moved = _through_map(gaps, t, soft, _distances(w, after[tiles]).mul_(pull[:, :, None]))
                shared[tiles, some] += moved.sum(1) + _over_entries(pull, shares)
                m = torch.ones_like(w) if counts is None else counts[some].expand_as(w)
                onward[tiles] -= _over_weights(moved, m)
            through = onward
        gradient = given * slope + shared if index is None else given * slope[:, index] + shared[:, index]
        return gradient.to(weights.dtype), None, None, None


def _values(weights: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return different values (1, U), their counts (U,) and the place of every weight among them (n,), for one tile of
    bfloat16 numbers; the weights themselves, and None, for others.
    """
    wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
    if weights.dtype != torch.bfloat16 or len(weights) > 1:
        return wide, None, None
    keys = weights[0].contiguous().view(torch.int16).to(torch.int32) + 32768
    counts = torch.bincount(keys, minlength=65536)
    known = counts.nonzero()[:, 0]
    place = torch.zeros(65536, dtype=torch.int64)
    place[known] = torch.arange(len(known))
    values = (known - 32768).to(torch.int16).view(torch.bfloat16).float()
    return values[None], counts[known].float(), place[keys]


def _parts(values: Tensor, centroids: Tensor, tau: Tensor) -> Iterator[tuple[Place, Tensor, Tensor, Tensor]]:
    """Yield places, weights, centroids and temperatures whose map has about ``AT_ONCE`` elements."""
    count, width = values.shape
    step = max(1, AT_ONCE // centroids.shape[1])
    tiles = max(1, step // width)
    for first in range(0, count, tiles):
        at = slice(first, first + tiles)
        for start in range(0, width, step):
            place = at, slice(start, start + step)
            yield place, values[place], centroids[at], tau[at]


def _distances(w: Tensor, c: Tensor) -> Tensor:
    """Return what weights (g, n) are above entries (g, K), as (g, K, n): what lies in a row is of one entry."""
    return w[:, None] - c[:, :, None]


def _map(gaps: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention map before and after it is kept above ``LEAST``, (g, K, n) each."""
    soft = torch.softmax(gaps.square().div_(-t[:, None, None]), 1)
    return soft, soft.clamp(min=LEAST)


def _through_map(gaps: Tensor, t: Tensor, soft: Tensor, of_map: Tensor) -> Tensor:
    """Return the gradient of each gap, (g, K, n), given that of the map; a weight's is the sum of its K gaps'."""
    free = F.threshold(soft, LEAST, 0.0).sign_().mul_(of_map)  # where the map is above LEAST
    free.sub_((soft * free).sum(1, keepdim=True))
    return free.mul_(soft).mul_(gaps).mul_(-2 / t[:, None, None])


def _over_weights(shares: Tensor, values: Tensor) -> Tensor:
    """Sum over weights, (g, K, n) and (g, n) -> (g, K), pair by pair: a product of matrices loses digits here."""
    return (shares * values[:, None]).sum(2)


def _over_entries(entries: Tensor, shares: Tensor) -> Tensor:
    """Sum over entries, (g, K) and (g, K, n) -> (g, n)."""
    return torch.bmm(entries[:, None], shares)[:, 0]
