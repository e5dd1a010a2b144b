"""Differentiable k-means, written as plainly as it is defined: the oracle that every faster way is compared with.

For each tile of weights w_i (a row of ``weights``) and its centroids c_j, a number of times,

    D_ij = (w_i - c_j)^2
    A_ij = exp(-D_ij / tau) / sum_k exp(-D_ik / tau)      the attention map, not below 1e-7
    c_j  = sum_i A_ij w_i / sum_i A_ij

and the clustered weight is ``sum_j A_ij c_j`` with the map of the last centroids. Autograd goes through all of it.

Source: Cho et al. 2022, arXiv:2108.12659 (DKM), whose training eDKM (Cho et al. 2024, arXiv:2309.00964) makes small
enough for language models. **Where we differ**: the temperature belongs to a tile, since it has the unit of a squared
weight, and the number of rounds is fixed, so that every run makes the same steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vivace.kernels.palette import lloyd

LEAST = 1e-7
"""Smallest attention of a weight to a centroid."""


def soft_map(weights: Tensor, centroids: Tensor, tau: Tensor) -> Tensor:
    """Return the attention map, (G, n), (G, K) and (G,) -> (G, n, K)."""
    distances = (weights[:, :, None] - centroids[:, None]).square()
    return torch.softmax(-distances / tau[:, None, None], -1).clamp(min=LEAST)


def dkm(weights: Tensor, centroids: Tensor, tau: Tensor, rounds: int = 3) -> tuple[Tensor, Tensor]:
    """Cluster tiles of weights softly, by plain autograd.

    Args:
        weights: (G, n).
        centroids: (G, K) to begin with.
        tau: (G,) temperatures.
        rounds: number of updates of the centroids.

    Returns:
        Clustered weights (G, n), and the last centroids (G, K).
    """
    for _ in range(rounds):
        shares = soft_map(weights, centroids, tau)
        centroids = (shares * weights[:, :, None]).sum(1) / shares.sum(1)
    shares = soft_map(weights, centroids, tau)
    return (shares * centroids[:, None]).sum(2), centroids


@torch.no_grad()
def first_centroids(weights: Tensor, bits: int) -> Tensor:
    """Return the centroids of Lloyd's algorithm, (G, n) -> (G, 2^bits) rising."""
    return lloyd(weights.float().sort(1).values, bits).sort(1).values.to(weights.dtype)


@torch.no_grad()
def temperature(centroids: Tensor, share: float = 0.1) -> Tensor:
    """Return tau of each tile: a share of the mean squared distance of neighbouring centroids, (G, K) -> (G,)."""
    spacing = centroids.sort(1).values.diff(dim=1).square().mean(1)
    return share * spacing.clamp(min=torch.finfo(centroids.dtype).tiny)
