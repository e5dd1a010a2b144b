"""Clustering a matrix softly while it is trained, in one of three ways that compute the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vivace.errors import ConfigError
from vivace.kernels.library import LANES
from vivace.kernels.palette import BITS
from vivace.palette.dkm import dkm, first_centroids, temperature
from vivace.palette.hooks import few_saved
from vivace.palette.unique import dkm_in_parts

Mode = Literal["own", "hooks", "plain"]
MODES: tuple[Mode, ...] = ("own", "hooks", "plain")
"""Own backward pass; plain autograd that keeps little, bit for bit; plain autograd."""


@dataclass(frozen=True)
class Clusters:
    """Clustered weights, and where the next step goes on from."""

    weight: Tensor
    """(out, in), with gradients to the matrix that was clustered."""
    centroids: Tensor
    """(tiles, 2^bits), without gradients."""
    tau: Tensor
    """(tiles,) temperatures."""
    kept_bytes: int | None = None
    """Bytes that the hooks keep for the backward pass; None without hooks."""


def cluster(
    weight: Tensor,
    bits: int = 3,
    *,
    rows: int | None = LANES,
    rounds: int = 3,
    share: float = 0.1,
    centroids: Tensor | None = None,
    tau: Tensor | None = None,
    mode: Mode = "own",
    group: Any = None,
) -> Clusters:
    """Cluster a matrix softly (``dkm.py``), so that a loss of the clustered weights trains the weights.

    Args:
        weight: (out, in) bfloat16, float32 or float64.
        bits: bits of a code; a palette has 2^bits entries.
        rows: outputs that share a palette; None is one palette for the matrix.
        rounds: updates of the centroids.
        share: temperature as a share of the mean squared distance of neighbouring centroids.
        centroids: (tiles, 2^bits) to go on from, those of the step before; None finds them by Lloyd's algorithm.
        tau: (tiles,) temperatures; None is by ``share``.
        mode: "own", which keeps centroids only; "hooks", with the bits of plain autograd; or "plain".
        group: process group that shares what hooks keep.

    Raises:
        ConfigError: a value is out of range, or ``rows`` does not divide the outputs.
    """
    if bits not in BITS:
        raise ConfigError(f"bits are 2, 3 or 4, found {bits}")
    if mode not in MODES:
        raise ConfigError(f"mode is {', '.join(MODES)}, found {mode!r}")
    if weight.dim() != 2 or not weight.is_floating_point() or weight.dtype == torch.float16:
        raise ConfigError(f"what is clustered is a matrix in bfloat16, float32 or float64, found {weight.dtype}")
    if rounds < 0 or share <= 0:
        raise ConfigError(f"rounds are at least 0 and the share is above 0, found {rounds} and {share:g}")
    height = len(weight) if rows is None else rows
    if height < 1 or len(weight) % height:
        raise ConfigError(f"{len(weight)} outputs do not divide into tiles of {height}; give rows that do")
    tiles = weight.reshape(len(weight) // height, -1)
    wide = torch.promote_types(weight.dtype, torch.float32)
    first = first_centroids(tiles.detach().to(wide), bits) if centroids is None else centroids.detach().to(wide)
    if first.shape != (len(tiles), 2**bits):
        raise ConfigError(f"centroids are {list(first.shape)}, expected {[len(tiles), 2**bits]}")
    warm = temperature(first, share) if tau is None else tau.to(wide)
    kept = None
    if mode == "own":
        made, last = dkm_in_parts(tiles, first, warm, rounds)
    elif mode == "plain":
        made, last = dkm(tiles.to(wide), first, warm, rounds)
    else:
        values = tiles.to(wide)
        with few_saved(values, group=group) as saved:
            made, last = dkm(values, first, warm, rounds)
        kept = saved.kept_bytes
    return Clusters(made.to(weight.dtype).view(weight.shape), last.detach(), warm, kept)
