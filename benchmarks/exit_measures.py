"""Measurements of early exits: comparison of routers, what an agreement target yields, and how residuals converge.

*Velocity* is the change of a residual per layer (M2R2, Bhendawade et al. 2025, arXiv:2502.02040). For every depth we
measure the cosine to the last residual, the length of the change relative to the residual, and how often the head,
applied at that depth, already chooses the token that it chooses at the top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.model import Decoder
from vivace.errors import ConfigError
from vivace.methods.dynamic.gates import GatedAccelerator, GatesConfig
from vivace.methods.dynamic.objective import RouterTraining, Trails, fit_router
from vivace.methods.dynamic.router import Router, RouterConfig, make_router
from vivace.methods.dynamic.thresholds import Scores, calibrate, exits, score_all
from vivace.train.data import TokenBatch
from vivace.train.distillation import FrozenPass


def roc_auc(score: Tensor, label: Tensor) -> float | None:
    """Return the area under the ROC curve: how often a true position scores higher than a false one, ties counted half.

    Args:
        score: (n,)
        label: (n,) bool.

    Returns:
        A value between 0 and 1; None if all labels are equal.
    """
    positives = int(label.sum())
    negatives = len(label) - positives
    if not positives or not negatives:
        return None
    values, place, counts = score.double().unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    ranks = (last - (counts - 1) / 2)[place]  # equal scores share the mean of their ranks
    assert len(values)
    return float((ranks[label].sum() - positives * (positives + 1) / 2) / (positives * negatives))


@dataclass(frozen=True)
class Tradeoff:
    """What one agreement target yields on text that was not used for calibration."""

    quality: float
    """The agreement target."""
    exit_shares: tuple[float, ...]
    """Share of all positions that exit at each gate."""
    exit_agreement: float | None
    """Share of the exits that choose the whole model's token; None if there were no exits."""
    agreement: float
    """The same share over all positions; those that reach the top agree."""
    mean_layers: float
    """Mean number of layers per token, without accelerated rows and filling the cache of skipped layers."""


def tradeoff(known: Scores, tried: Scores, quality: float, gates: GatesConfig, num_layers: int) -> Tradeoff:
    """Calibrate thresholds on some positions and evaluate them on others.

    Args:
        known: positions to calibrate on.
        tried: positions to evaluate on.
        quality: the agreement target.
        gates: the places of the exits.
        num_layers: number of layers of the model.
    """
    plan = calibrate(known, quality, minimum_exit_share=gates.minimum_exit_share(num_layers))
    gate = exits(tried, plan)
    left = gate < len(gates.gates)
    right = tried.agrees.gather(1, gate.clamp(max=len(gates.gates) - 1)[:, None])[:, 0] | ~left
    layers = torch.tensor([*gates.layers, num_layers])[gate].double()
    return Tradeoff(
        quality=quality,
        exit_shares=tuple(float((gate == number).double().mean()) for number in range(len(gates.gates))),
        exit_agreement=float(right[left].double().mean()) if bool(left.any()) else None,
        agreement=float(right.double().mean()),
        mean_layers=float(layers.mean()),
    )


@dataclass(frozen=True)
class RouterRow:
    """The measurements of one router."""

    kind: str
    num_weights: int
    auc: tuple[float | None, ...]
    """Area under the ROC curve at each gate."""
    tradeoffs: tuple[Tradeoff, ...]


@dataclass(frozen=True)
class RouterTrial:
    """The positions of a comparison, for training, for calibration and for evaluation."""

    learnt: Trails
    known: Trails
    tried: Trails


def compare_routers(
    model: Decoder,
    accelerator: GatedAccelerator,
    configs: Sequence[RouterConfig],
    trial: RouterTrial,
    *,
    lesson: RouterTraining,
    qualities: Sequence[float],
) -> list[tuple[RouterRow, Router]]:
    """Train routers on the same positions and evaluate them on the same others.

    Args:
        model: the frozen decoder.
        accelerator: the gates with their accelerated residuals.
        configs: the routers; all have the same stride, since the positions have.
        trial: the positions.
        lesson: how to train the routers that have weights.
        qualities: agreement targets to calibrate for.

    Returns:
        The measurements of each router, and the router.

    Raises:
        ConfigError: the strides differ.
    """
    if len({config.stride for config in configs}) != 1:
        raise ConfigError(f"routers on the same trails have one stride, found {[c.stride for c in configs]}")
    gates, found = accelerator.config, []
    for config in configs:
        torch.manual_seed(0)
        router = make_router(config, gates, model.config.width)
        fit_router(model, router, trial.learnt, lesson)
        known, tried = (score_all(model, router, trails) for trails in (trial.known, trial.tried))
        auc = tuple(roc_auc(tried.score[:, gate], tried.agrees[:, gate]) for gate in range(len(gates.gates)))
        rows = tuple(tradeoff(known, tried, quality, gates, model.config.num_layers) for quality in qualities)
        weights = sum(p.numel() for p in router.parameters())
        found.append((RouterRow(config.kind, weights, auc, rows), router))
    return found


@dataclass(frozen=True)
class Velocity:
    """How one residual stream changes, depth by depth."""

    depths: tuple[int, ...]
    cosine: tuple[float, ...]
    """Mean cosine to the last residual of the whole model."""
    step: tuple[float, ...]
    """Mean length of the change from the layer before, relative to the residual before."""
    agreement: tuple[float, ...]
    """Share of positions at which the head chooses the same token as at the top."""


@torch.no_grad()
def velocities(
    model: Decoder, accelerator: GatedAccelerator, batches: Sequence[TokenBatch]
) -> tuple[Velocity, list[Velocity]]:
    """Measure the velocity of the model's residuals and of each gate's accelerated residuals, over answer positions.

    Args:
        model: the frozen decoder.
        accelerator: the gates with their accelerated residuals.
        batches: rows of text.
    """
    config = accelerator.config
    spans = [config.interval(gate) for gate in range(len(config.gates))]
    slow_sums = torch.zeros(model.config.num_layers, 3, dtype=torch.float64)
    fast_sums = [torch.zeros(stop - start, 3, dtype=torch.float64) for start, stop in spans]
    count = 0
    for batch in batches:
        slow = FrozenPass.of(model, batch.tokens, range(model.config.num_layers))
        rows = batch.predicting
        top = slow.final[rows]
        count += len(rows)
        said = model.greedy(top)
        for depth in range(model.config.num_layers):
            before, h = slow.residuals[depth][rows], slow.residuals[depth + 1][rows]
            slow_sums[depth] += _look(model, before, h, h, top, said)
        for gate, (start, stop) in enumerate(spans):
            depths = range(start + 1, stop + 1)
            trail = accelerator.accelerate(model, gate, slow.residuals[start], slow.step, depths)[rows]
            before = slow.residuals[start][rows]
            for place in range(stop - start):
                p = trail[:, place]
                fast_sums[gate][place] += _look(model, before, p, accelerator.at_gate(gate, p), top, said)
                before = p
    fast = [
        _velocity(range(start + 1, stop + 1), sums / count)
        for (start, stop), sums in zip(spans, fast_sums, strict=True)
    ]
    return _velocity(range(1, model.config.num_layers + 1), slow_sums / count), fast


def _look(model: Decoder, before: Tensor, h: Tensor, read: Tensor, top: Tensor, said: Tensor) -> Tensor:
    """Return the sums of cosine, relative change and agreement over rows, (3,)."""
    cosine = F.cosine_similarity(h.float(), top.float(), dim=-1).sum()
    step = ((h.float() - before.float()).norm(dim=-1) / before.float().norm(dim=-1)).sum()
    agreed = (model.greedy(read) == said).sum()
    return torch.stack([cosine.double(), step.double(), agreed.double()])


def _velocity(depths: range, means: Tensor) -> Velocity:
    """Build a ``Velocity`` from the means (depths, 3)."""
    cosine, step, agreement = means.T.tolist()
    return Velocity(tuple(depths), tuple(cosine), tuple(step), tuple(agreement))
