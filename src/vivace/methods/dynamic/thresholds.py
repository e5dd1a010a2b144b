"""How confident a router must be: a threshold per gate, calibrated on held-back text for a stated agreement.

*Agreement* is the share of the tokens exiting at a gate that are the whole model's token there (greedy, after the same
text). Gates are calibrated from the lowest up, each on the positions that have not exited below it, so the stated
agreement holds for each gate; tokens that pass all layers agree by definition, so over all tokens it is higher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vivace.core.model import Decoder
from vivace.decode.depth import ExitThresholds
from vivace.methods.dynamic.objective import Trails
from vivace.methods.dynamic.router import Router

QUALITIES = (0.9, 0.95, 0.98, 0.99)
"""Agreements for which thresholds are kept."""
FEWEST = 50
"""Smallest number of positions that must exceed a gate's threshold; with fewer, no token exits there."""


@dataclass(frozen=True)
class Scores:
    """The scores of every gate for the same positions."""

    score: Tensor
    """(n, J) float32."""
    agrees: Tensor
    """(n, J) bool."""


@torch.no_grad()
def score_all(model: Decoder, router: Router, trails: Trails) -> Scores:
    """Return a router's scores of all positions of some trails."""
    pairs = enumerate(zip(trails.states, trails.exit_hidden, strict=True))
    judged = [router.score(gate, states, partial(model.head, p)) for gate, (states, p) in pairs]
    return Scores(torch.stack(judged, 1).float(), trails.agrees)


def calibrate(
    scores: Scores, quality: float, *, fewest: int = FEWEST, minimum_exit_share: Sequence[float] = ()
) -> ExitThresholds:
    """Return the lowest thresholds at which at least the share ``quality`` of the exits agree.

    Args:
        scores: of held-back positions.
        quality: the agreement asked for, in (0, 1).
        fewest: smallest number of positions that must exceed a threshold.
        minimum_exit_share: share of the positions asked that must exit at each gate, else no token exits there
            (``GatesConfig``); empty allows every gate that can keep the agreement.
    """
    left = torch.ones(len(scores.score), dtype=torch.bool, device=scores.score.device)
    thresholds: list[float | None] = []
    for gate in range(scores.score.shape[1]):
        score = scores.score[:, gate]
        threshold = _lowest(score[left], scores.agrees[left, gate], quality, fewest)
        if threshold is not None and minimum_exit_share:
            leaving = float((score[left] > threshold).double().mean())
            threshold = threshold if leaving >= minimum_exit_share[gate] else None
        thresholds.append(threshold)
        if threshold is not None:
            left = left & (score <= threshold)
    return ExitThresholds(quality, tuple(thresholds))


def exit_shares(scores: Scores, plan: ExitThresholds) -> list[float]:
    """Return the share of all positions that exits at each gate."""
    depth = exits(scores, plan)
    return [float((depth == gate).double().mean()) for gate in range(len(plan.thresholds))]


def exits(scores: Scores, plan: ExitThresholds) -> Tensor:
    """Return the index of the gate at which each position exits, (n,); J for those that pass all layers."""
    gates = len(plan.thresholds)
    depth = torch.full((len(scores.score),), gates, device=scores.score.device)
    for gate in reversed(range(gates)):
        threshold = plan.thresholds[gate]
        if threshold is not None:
            depth[scores.score[:, gate] > threshold] = gate
    return depth


def _lowest(score: Tensor, agrees: Tensor, quality: float, fewest: int) -> float | None:
    """Return the lowest score such that those above it agree often enough; None where there is none."""
    if len(score) < fewest:
        return None
    order = score.argsort(descending=True, stable=True)
    ranked = score[order]
    share = agrees[order].double().cumsum(0) / torch.arange(1, len(order) + 1, device=order.device)
    last_of_equals = torch.ones_like(order, dtype=torch.bool)  # equal scores pass together or not at all
    last_of_equals[:-1] = ranked[:-1] > ranked[1:]
    good = ((share >= quality) & last_of_equals).nonzero()[:, 0]
    if len(good) == 0 or int(good[-1]) + 1 < fewest:
        return None
    place = int(good[-1])
    return float(ranked[place + 1] if place + 1 < len(ranked) else ranked[place] - 1)
