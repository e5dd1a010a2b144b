"""Rounding one matrix to a palette: evenly, by clustering its weights, or so that its outputs change little.

A weight w of input i counts by its importance h_i: the mean square of the input, or the mean square of the weight's own
gradient. With ``H`` the mean of ``x x^T`` over the inputs x of a text, the loss of a matrix W rounded to W' is

    tr((W - W') H (W - W')^T)

``rtn`` rounds to even steps. ``kmeans`` and ``fisher`` find the entries of each sixteen outputs by weighted Lloyd's
algorithm, in turn with the scales of 64 inputs, which are fitted by least squares. ``gptq`` then chooses the codes
input by input, and the weights of the inputs still to come make up for the error of each (Frantar et al. 2023,
arXiv:2210.17323): with U the upper Cholesky factor of H's inverse, a column j with error e adds
``-e U[j, k] / U[j, j]`` to every later column k. At the end scales, or entries that have none, are fitted once more for
the codes that were chosen, by least squares in H.

**Where we differ** from GPTQ: codes select entries of a palette; inputs go from the largest mean square to the
smallest, with scales that are set before; and H is damped in proportion to each input's own mean square, so that one
huge input does not blur all others.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.kernels.coded import Coded, PaletteCodes, RowCodes
from vivace.kernels.library import GROUP, LANES
from vivace.kernels.palette import BITS, lloyd, nearest

Method = Literal["rtn", "kmeans", "fisher", "gptq"]
METHODS: tuple[Method, ...] = ("rtn", "kmeans", "fisher", "gptq")

DAMPING = 0.01
"""Share of each input's mean square that is added to it, so that H can be inverted."""
TURNS = 3
"""Times that entries and scales are fitted in turn."""
ROUNDS = 15
"""Iterations of Lloyd's algorithm in each turn."""
BLOCK = 128
"""Inputs that GPTQ rounds before it changes the weights of all later ones."""


def round_matrix(
    weight: Tensor,
    bits: int,
    method: Method,
    *,
    importance: Tensor | None = None,
    moments: Tensor | None = None,
    has_scales: bool = True,
) -> Coded:
    """Round a matrix.

    Args:
        weight: (out, in).
        bits: 2, 3 or 4 to a palette; 8 to integers with a scale for each output, whatever the method.
        method: how.
        importance: (in,) or (out, in), for kmeans and fisher; None counts all weights alike.
        moments: H, (in, in), for gptq.
        has_scales: whether entries are integers with a scale for each output and 64 inputs, or bfloat16 without.
    """
    if bits == 8:
        return RowCodes.of(weight)
    assert bits in BITS
    weight = weight.float()
    if method == "rtn":
        return _even(weight, bits, has_scales=has_scales)
    if method != "gptq":
        entries, scales = _clustered(weight, bits, importance, has_scales=has_scales)
        return _coded(_nearest(weight, entries, scales), entries, scales)
    assert moments is not None
    damped = _damped(moments)
    entries, scales = _clustered(weight, bits, damped.diagonal().float(), has_scales=has_scales)
    codes = _compensated(weight, entries, scales, damped)
    entries, scales = _refitted(weight, codes, entries, scales, damped.float())
    return _coded(codes, entries, scales)


def output_error(weight: Tensor, made: Coded, moments: Tensor, gains: Tensor | None = None) -> float:
    """Return ``sum_o g_o (E H E^T)_oo`` for E = W - W', with gains g (out,), ones where None."""
    error = weight.float() - made.dense()
    each = ((error @ moments) * error).sum(1)
    return float((each if gains is None else each * gains).sum())


def _even(weight: Tensor, bits: int, *, has_scales: bool) -> PaletteCodes:
    """Round to the integers -2^(bits - 1) .. 2^(bits - 1) - 1 times a scale that maps the largest weight to an end."""
    half = 1 << bits - 1
    tiles = -(-len(weight) // LANES)
    steps = torch.arange(-half, half)
    if has_scales:
        unit = 127 // half
        groups = _grouped(weight)
        most = groups.gather(2, groups.abs().argmax(2, keepdim=True))[:, :, 0]
        scales = (-most / (half * unit)).bfloat16()
        entries = (steps * unit).float().expand(tiles, -1)
        return _coded(_nearest(weight, entries, scales.float()), entries, scales.float())
    most = F.pad(weight, (0, 0, 0, -len(weight) % LANES)).view(tiles, -1).abs().amax(1)
    entries = (steps * (most / half)[:, None]).bfloat16().float()
    return _coded(_nearest(weight, entries, None), entries, None)


def _clustered(
    weight: Tensor, bits: int, importance: Tensor | None, *, has_scales: bool
) -> tuple[Tensor, Tensor | None]:
    """Return entries (tiles, 2^bits) and scales (out, groups), which are fitted in turn, as float32 numbers."""
    mass = torch.ones(weight.shape) if importance is None else importance.float().expand(weight.shape)
    mass = mass + 1e-6 * mass.mean()
    if not has_scales:
        return _entries(weight, mass, bits).bfloat16().float(), None
    groups, heavy = _grouped(weight), _grouped(mass)
    scales = (groups.abs().amax(2) / 127).bfloat16().float()
    for _ in range(TURNS):
        wide = _wide(scales, weight.shape[1])
        values = torch.where(wide == 0, 0.0, weight / wide)
        entries = _entries(values, mass * wide.square(), bits).round().clamp(-127, 127)
        chosen = _grouped(_chosen(_nearest(weight, entries, scales), entries))
        fitted = (heavy * groups * chosen).sum(2) / (heavy * chosen.square()).sum(2)
        scales = torch.where(fitted > 0, fitted, scales).bfloat16().float()
    return entries, scales


def _entries(values: Tensor, mass: Tensor, bits: int) -> Tensor:
    """Return the entries of each tile of sixteen outputs, (out, in) -> (tiles, 2^bits); padding has no mass."""
    pad = (0, 0, 0, -len(values) % LANES)
    flat, heavy = (F.pad(part, pad).view(-1, LANES * values.shape[1]) for part in (values, mass))
    ordered, order = flat.sort(1)
    return lloyd(ordered, bits, heavy.gather(1, order), ROUNDS).sort(1).values


def _compensated(weight: Tensor, entries: Tensor, scales: Tensor | None, damped: Tensor) -> Tensor:
    """Return the codes (out, in) that GPTQ chooses, given entries and scales."""
    out, width = weight.shape
    order = damped.diagonal().argsort(descending=True, stable=True)
    factor = _inverse_factor(damped[order][:, order])
    left, codes = weight[:, order].clone(), torch.empty(out, width, dtype=torch.uint8)
    each = entries.repeat_interleave(LANES, 0)[:out]
    middles = (each[:, 1:] + each[:, :-1]) / 2
    group = order // GROUP
    for first in range(0, width, BLOCK):
        last = min(first + BLOCK, width)
        part, errors = left[:, first:last], torch.empty(out, last - first)
        for place in range(last - first):
            row, column = factor[first + place], part[:, place]
            scale = None if scales is None else scales[:, group[first + place]]
            value = column if scale is None else torch.where(scale == 0, 0.0, column / scale)
            code = (value[:, None] > middles).sum(1, keepdim=True)
            codes[:, first + place] = code[:, 0]
            kept = each.gather(1, code)[:, 0] * (1.0 if scale is None else scale)
            error = (column - kept) / row[first + place]
            part[:, place + 1 :] -= error[:, None] * row[first + place + 1 : last]
            errors[:, place] = error
        left[:, last:] -= errors @ factor[first:last, last:]
    placed = torch.empty_like(codes)
    placed[:, order] = codes
    return placed


def _refitted(
    weight: Tensor, codes: Tensor, entries: Tensor, scales: Tensor | None, moments: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Fit the scales, or entries without any, to codes that stay, by least squares in H."""
    target = weight @ moments
    if scales is None:
        return _refitted_entries(target, codes, entries, moments), None
    chosen = _chosen(codes, entries)
    parts, count = _grouped(chosen), scales.shape[1]
    normal, wanted = torch.empty(len(weight), count, count), torch.empty(len(weight), count)
    for g in range(count):
        place = slice(g * GROUP, min((g + 1) * GROUP, weight.shape[1]))
        through = chosen[:, place] @ moments[place]
        normal[:, g] = (_grouped(through) * parts).sum(2)
        wanted[:, g] = (chosen[:, place] * target[:, place]).sum(1)
    fitted = _solved(normal, wanted, scales)
    return entries, torch.where(fitted * scales > 0, fitted, scales).bfloat16().float()


def _refitted_entries(target: Tensor, codes: Tensor, entries: Tensor, moments: Tensor) -> Tensor:
    """Fit the entries of each tile, given W H."""
    tiles, num = entries.shape
    pad = (0, 0, 0, -len(codes) % LANES)

    def by_tile(values: Tensor) -> Tensor:
        return F.pad(values, pad).view(tiles, -1).sum(1)

    masks = [(codes == k).float() for k in range(num)]
    normal, wanted = torch.empty(tiles, num, num), torch.empty(tiles, num)
    for k, mask in enumerate(masks):
        through = mask @ moments
        wanted[:, k] = by_tile(mask * target)
        for j, other in enumerate(masks):
            normal[:, k, j] = by_tile(through * other)
    fitted = _solved(normal, wanted, entries)
    is_rising = (fitted.diff(dim=1) >= 0).all(1, keepdim=True)
    return torch.where(is_rising, fitted, entries).bfloat16().float()


def _solved(normal: Tensor, wanted: Tensor, before: Tensor) -> Tensor:
    """Solve equations (n, k, k) for the change of ``before`` (n, k), slightly damped."""
    rest = wanted - (normal @ before[:, :, None])[:, :, 0]
    size = normal.diagonal(dim1=1, dim2=2).clamp(min=1e-30)
    damped = normal + torch.diag_embed(1e-4 * size + 1e-30)
    change: Tensor = torch.linalg.solve(damped.double(), rest.double())
    return before + change.float()


def _damped(moments: Tensor) -> Tensor:
    """Return H in float64 with a share of each diagonal element added to it."""
    wide = moments.double()
    size = wide.diagonal()
    known = size[size > 0]
    least = 1e-6 * known.median() if len(known) else torch.ones((), dtype=torch.float64)
    return wide + torch.diag(DAMPING * size + least)


def _inverse_factor(damped: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of H, (in, in) float32."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


def _coded(codes: Tensor, entries: Tensor, scales: Tensor | None) -> PaletteCodes:
    if scales is None:
        return PaletteCodes(codes, entries.bfloat16())
    return PaletteCodes(codes, entries.to(torch.int8), scales.bfloat16())


def _nearest(weight: Tensor, entries: Tensor, scales: Tensor | None) -> Tensor:
    """Return the codes of the nearest entries, (out, in) uint8."""
    values = weight
    if scales is not None:
        wide = _wide(scales, weight.shape[1])
        values = torch.where(wide == 0, 0.0, weight / wide)
    flat = F.pad(values, (0, 0, 0, -len(values) % LANES)).view(len(entries), -1)
    return nearest(flat, entries).view(-1, weight.shape[1])[: len(weight)]


def _chosen(codes: Tensor, entries: Tensor) -> Tensor:
    """Return the entries of codes, (out, in) float32."""
    return entries.repeat_interleave(LANES, 0)[: len(codes)].gather(1, codes.long())


def _grouped(values: Tensor) -> Tensor:
    """Divide inputs into groups, (out, in) -> (out, groups, 64), padded with zeros."""
    return F.pad(values, (0, -values.shape[1] % GROUP)).view(len(values), -1, GROUP)


def _wide(factors: Tensor, width: int) -> Tensor:
    """Repeat a number of each group for its inputs, (out, groups) -> (out, in)."""
    return factors.repeat_interleave(GROUP, 1)[:, :width]
