"""Training the gates on the frozen model, and then the router that decides about exits.

Stage 1 trains every gate j at once (they share only the frozen pass), over answer positions only:

    L = sum_j [ a_kd KL(softmax(z / tau) || softmax(z_j / tau)) tau^2 + a_ce CE(z_j, next token)
                + a_al (1 - cos(p[N_j], h[M_j])) ] / J

with z the frozen model's logits, z_j those of the shared head at gate j, and h[M_j] the slow residual at its target
depth.

Stage 2 uses rows that stage 1 has not seen: the router learns whether the gate's token is the whole model's,

    y_j = 1[argmax z_j == argmax z],     BCE(s_j, y_j), the rarer label weighted up to five times.

Its inputs have no gradient, so the gates do not change, and are computed once for all epochs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.draft_head import DraftHead
from vivace.core.model import Decoder
from vivace.errors import ConfigError
from vivace.methods.dynamic.gates import GatedAccelerator
from vivace.methods.dynamic.router import Router, RouterConfig
from vivace.train.data import DecoderObjective, TokenBatch
from vivace.train.distillation import AlignedLoss, Cut, FrozenPass, rows_at_once, slices
from vivace.train.objective import LossParts
from vivace.train.rows import RowsConfig, fit_rows

MAX_WEIGHT = 5.0
"""Largest weight that makes up for a rare label; with a larger one, noise would dominate."""


@dataclass(frozen=True)
class GatesLoss(AlignedLoss):
    """Weights of the three loss terms of stage 1."""


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts))


class GatesObjective(DecoderObjective):
    """Stage 1: trains the accelerated residuals of all gates."""

    def __init__(self, accelerator: GatedAccelerator, loss: GatesLoss) -> None:
        self.accelerator = accelerator
        self.loss = loss

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return all adapter weights, without weight decay."""
        return [{"params": list(self.accelerator.parameters()), "name": "gates", "weight_decay": 0.0}]

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the loss in parts of ``rows`` positions, all gates in each, then the backward pass through the
        adapters.
        """
        config, rows, targets = self.accelerator.config, batch.predicting, batch.targets
        frozen = slow_pass(model, self.accelerator, batch.tokens)
        gates = []
        for gate, depth in enumerate(config.layers):
            start = frozen.residuals[config.interval(gate)[0]]
            trail = self.accelerator.accelerate(model, gate, start, frozen.step, (depth,))
            gates.append(self.accelerator.at_gate(gate, trail[rows, -1]))
        cut = Cut(*gates)
        for part in slices(len(rows), rows_at_once(self.loss.rows, model.config.vocab_size)):
            truth = frozen.logits(DraftHead(model), rows[part])
            total, seen = cut.copies[0].new_zeros(()), {}
            for gate, p in enumerate(cut.copies):
                aim = frozen.residuals[config.target(gate, model.config.num_layers)][rows[part]]
                loss, sums = self.loss.of_residuals(model.head, p[part], truth, aim, targets[part])
                total = total + loss
                seen[f"agreement_{gate + 1}"] = float(sums["agreement"]) / len(rows)
            yield total / (len(gates) * len(rows)), seen
        yield from cut.rest()


def slow_pass(model: Decoder, accelerator: GatedAccelerator, tokens: Tensor) -> FrozenPass:
    """Run the frozen pass over texts (B, T), keeping the residuals from which gates start and at which they should
    arrive.
    """
    config = accelerator.config
    gates = range(len(config.gates))
    depths = {config.interval(gate)[0] for gate in gates}
    depths |= {config.target(gate, model.config.num_layers) for gate in gates}
    return FrozenPass.of(model, tokens, depths)


@dataclass(frozen=True)
class Trails:
    """Inputs and labels of the routers for the positions of a batch."""

    states: tuple[Tensor, ...]
    """By gate: (n, depths, E) accelerated residuals."""
    exit_hidden: tuple[Tensor, ...]
    """By gate: (n, E) what the head reads there."""
    agrees: Tensor
    """(n, J) bool: whether the gate's likeliest token is the whole model's."""

    @property
    def num_positions(self) -> int:
        """Return the number of positions, n."""
        return len(self.agrees)

    def take(self, rows: Tensor) -> Trails:
        """Return the trails of some of the positions, those of ``rows``."""
        return Trails(tuple(s[rows] for s in self.states), tuple(p[rows] for p in self.exit_hidden), self.agrees[rows])

    @staticmethod
    def join(parts: Sequence[Trails]) -> Trails:
        """Return the positions of several batches as one."""
        states = zip(*(part.states for part in parts), strict=True)
        exit_hidden = zip(*(part.exit_hidden for part in parts), strict=True)
        agrees = torch.cat([part.agrees for part in parts])
        return Trails(tuple(map(_joined, states)), tuple(map(_joined, exit_hidden)), agrees)


@torch.no_grad()
def trails_of(model: Decoder, accelerator: GatedAccelerator, config: RouterConfig, batch: TokenBatch) -> Trails:
    """Return the trails of a batch's answer positions at every gate, with the text as input (teacher forcing).

    Args:
        model: the frozen decoder.
        accelerator: its trained gates.
        config: depths that the router reads.
        batch: rows of text.
    """
    gates, rows = accelerator.config, batch.predicting
    slow = slow_pass(model, accelerator, batch.tokens)
    truth = model.greedy(slow.final[rows])
    states, exit_hidden = [], []
    for gate in range(len(gates.gates)):
        start = slow.residuals[gates.interval(gate)[0]]
        trail = accelerator.accelerate(model, gate, start, slow.step, config.depths(gates, gate))
        states.append(trail[rows])
        exit_hidden.append(accelerator.at_gate(gate, trail[rows, -1]))
    agrees = torch.stack([model.greedy(p) == truth for p in exit_hidden], 1)
    return Trails(tuple(states), tuple(exit_hidden), agrees)


@dataclass(frozen=True)
class RouterTraining:
    """Settings of stage 2."""

    epochs: int = 8
    """Number of times every position is used; the router's inputs are computed once."""
    positions: int = 512
    """Number of positions per update."""
    rate: float = 0.003
    """Learning rate of AdamW, which falls linearly to zero."""

    def __post_init__(self) -> None:
        if min(self.epochs, self.positions) < 1 or self.rate <= 0:
            raise ConfigError(
                f"epochs and positions must be >= 1 and rate > 0, found {self.epochs}, {self.positions}, {self.rate}"
            )


def fit_router(model: Decoder, router: Router, trails: Trails, training: RouterTraining, *, seed: int = 0) -> None:
    """Train a router in place to predict when its gates are right; a router without weights is left alone.

    Args:
        model: the frozen decoder.
        router: of the gates that made the trails.
        trails: of rows on which the gates were not trained.
        training: how long and how fast to train.
        seed: seed of the order of the positions.
    """
    weights = list(router.parameters())
    if not weights:
        return

    def loss(rows: Tensor) -> Tensor:
        return router_loss(model, router, trails.take(rows))

    how = RowsConfig(epochs=training.epochs, batch_rows=training.positions, rate=training.rate, falls=True, seed=seed)
    fit_rows(weights, loss, trails.num_positions, how)


def router_loss(model: Decoder, router: Router, trails: Trails) -> Tensor:
    """Mean binary cross-entropy over gates; the rarer answer counts up to ``MAX_WEIGHT`` times."""
    losses = []
    for gate, (states, p) in enumerate(zip(trails.states, trails.exit_hidden, strict=True)):
        labels = trails.agrees[:, gate].float()
        share = labels.mean().clamp(1e-6, 1 - 1e-6)
        weight = (1 / share - 1).clamp(1 / MAX_WEIGHT, MAX_WEIGHT)
        score = router(gate, states, partial(model.head, p))
        losses.append(F.binary_cross_entropy_with_logits(score, labels, pos_weight=weight))
    return torch.stack(losses).mean()
