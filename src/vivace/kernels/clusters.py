"""Soft clustering of tiles of weights by native kernels, and its gradient: ``palette/dkm.py`` says what is computed.

A map of K shares for every weight is made in registers and used at once, on the way there and on the way back, so that
a pass reads the weights and writes one number for each. Sums over weights are float64, of float32 sums of a few dozens.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from vivace.kernels.library import CClustering, body_of, found_library, runnable
from vivace.kernels.threads import num_threads

ENTRIES = (4, 8, 16)
"""Numbers of entries that the kernels know."""


def clusters_natively(weights: Tensor, entries: int) -> bool:
    """Return whether the kernels cluster such weights here: float32 in memory, and a number of entries they know."""
    library = found_library()
    is_known = weights.dtype == torch.float32 and weights.device.type == "cpu" and entries in ENTRIES
    return is_known and library is not None and bool(runnable(library))


def soft_clusters(weights: Tensor, centroids: Tensor, tau: Tensor, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cluster tiles.

    Args:
        weights: (G, n) float32.
        centroids: (G, K) float32 to begin with.
        tau: (G,) float32 temperatures.
        rounds: number of updates of the centroids.

    Returns:
        Clustered weights (G, n); the centroids before each round and after the last one (rounds + 1, G, K); the sums
        of the shares in each round (rounds, G, K).
    """
    weights, tau = weights.contiguous(), tau.contiguous()
    each = centroids.new_empty(rounds + 1, *centroids.shape)
    each[0] = centroids
    totals = centroids.new_empty(rounds, *centroids.shape)
    clustered = torch.empty_like(weights)
    _call(weights, tau, each, totals, clustered, None, None)
    return clustered, each, totals


def soft_clusters_gradient(weights: Tensor, tau: Tensor, each: Tensor, totals: Tensor, given: Tensor) -> Tensor:
    """Return the gradient of the weights (G, n), given that of the clustered weights (G, n) and what was returned."""
    gradient = torch.empty_like(weights, memory_format=torch.contiguous_format)
    _call(weights.contiguous(), tau.contiguous(), each, totals, None, given.contiguous(), gradient)
    return gradient


def _call(
    weights: Tensor,
    tau: Tensor,
    each: Tensor,
    totals: Tensor,
    clustered: Tensor | None,
    given: Tensor | None,
    gradient: Tensor | None,
) -> None:
    library = found_library()
    assert library is not None
    tensors = (weights, tau, each, totals, clustered, given, gradient)
    addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    call = CClustering(*addresses, *weights.shape, each.shape[2], len(totals))
    library.vivace_cluster(body_of(library), num_threads(), byref(call))
