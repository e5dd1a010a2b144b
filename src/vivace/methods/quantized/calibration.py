"""Quantizing matrices to four bits so that their outputs change little, on inputs that they see in texts.

GPTQ (Frantar et al. 2023, arXiv:2210.17323) quantizes the inputs of a matrix one after the other and moves the weights
of those that are still to come so that they make up for the error. With ``H = sum x x^T`` over the inputs x of a
calibration text, and ``U`` the upper Cholesky factor of its inverse, quantizing column j with error e adds

    -e U[j, k] / U[j, j]   to every later column k.

**Where we differ**: codes stand for the sixteen integers of ``q4``; the scale of 64 inputs is the candidate with the
smallest error weighted by ``1 / U[j, j]^2``, searched when its first input is reached; and every matrix sees the inputs
of the model as it is, since the text that a draft reads was stored by that model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.kernels.low_bit import GROUP, RATIOS, TABLE, TINY

DAMPING = 0.02
"""Share of the mean of H's diagonal that is added to it, so that it can be inverted."""


def quantized_for(weight: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix.

    Args:
        weight: (out, in).
        moments: (in, in) float32, the sum of ``x x^T`` over its inputs x.

    Returns:
        Codes (out, groups * 64) uint8 and scales (out, groups) bfloat16.
    """
    factor = _inverse_factor(moments)
    missing = -weight.shape[1] % GROUP
    left, table = F.pad(weight.float(), (0, missing)), torch.tensor(TABLE).float()
    middles = (table[1:] + table[:-1]) / 2
    width, codes = weight.shape[1], torch.zeros(len(weight), left.shape[1], dtype=torch.uint8)
    scales = torch.zeros(len(weight), left.shape[1] // GROUP, dtype=torch.bfloat16)
    for first in range(0, width, GROUP):
        last = min(first + GROUP, width)
        group, errors = left[:, first:last].clone(), torch.zeros(len(weight), last - first)
        importance = factor.diagonal()[first:last] ** -2
        scale = _best_scales(group, importance, table, middles)
        scales[:, first // GROUP] = scale
        size = scale.float()
        inverse = torch.where(size == 0, 0.0, 1 / size)
        for place in range(last - first):
            row, column = factor[first + place], group[:, place]
            code = torch.bucketize(column * inverse, middles)
            codes[:, first + place] = code
            error = (column - size * table[code]) / row[first + place]
            group[:, place + 1 :] -= error[:, None] * row[first + place + 1 : last]
            errors[:, place] = error
        left[:, last:width] -= errors @ factor[first:last, last:]
    return codes, scales


def _inverse_factor(moments: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the damped moments."""
    mean = moments.diagonal().mean().clamp(min=TINY)
    damped = moments + DAMPING * mean * torch.eye(len(moments))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


def _best_scales(group: Tensor, importance: Tensor, table: Tensor, middles: Tensor) -> Tensor:
    """Return the scale (out,) bfloat16 of each row of a group (out, n) with the smallest error weighted by (n,)."""
    most = group.abs().amax(1, keepdim=True)
    best, least = torch.zeros_like(most), torch.full_like(most, torch.inf)
    for ratio in RATIOS:
        scale = ratio * most / table.abs().max()
        for _ in range(2):
            entries = table[torch.bucketize(group / scale, middles)]
            lost = (importance * (group - scale * entries).square()).sum(1, keepdim=True)
            is_better = lost < least
            best, least = torch.where(is_better, scale, best), torch.where(is_better, lost, least)
            refit = (importance * group * entries).sum(1, keepdim=True)
            refit = refit / (importance * entries.square()).sum(1, keepdim=True)
            scale = torch.where(refit / scale > 1e-3, refit, scale)
    return torch.where(most < TINY, 0.0, best)[:, 0].bfloat16()
