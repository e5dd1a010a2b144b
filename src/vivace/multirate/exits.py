"""Training the gates on the frozen model, and then the router that may open them.

Stage 1, every gate j at once (they share nothing but the frozen pass), over answer positions only:

    L = sum_j [ a_kd KL(softmax(z / tau) || softmax(z_j / tau)) tau^2 + a_ce CE(z_j, next token)
                + a_al (1 - cos(p[N_j], h[M_j])) ] / J

with z the frozen model's logits, z_j the shared head at gate j and h[M_j] the slow residual at its target depth.

Stage 2, on rows that stage 1 has not seen: the router learns whether the gate says what the whole model would,

    y_j = 1[argmax z_j == argmax z],     BCE(s_j, y_j), the rarer answer weighted up to five times.

Its inputs carry no gradient, so the gates stay as they are, and are computed once for all epochs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.errors import ConfigError
from vivace.multirate.gates import GatedAccelerator
from vivace.multirate.router import Router, RouterConfig
from vivace.train.data import DecoderObjective, TokenBatch
from vivace.train.objective import Parts

MAX_WEIGHT = 5.0
"""A label this much rarer than the other counts as much; beyond that it would be noise."""


@dataclass(frozen=True)
class GatesLoss:
    """Weights of the three terms of stage 1."""

    distillation: float = 1.0
    """a_kd."""
    cross_entropy: float = 0.1
    """a_ce."""
    alignment: float = 0.1
    """a_al."""
    temperature: float = 1.0
    """tau."""
    rows: int = 1024
    """Positions whose logits are held at once; the loss is summed in parts of this many."""

    def __post_init__(self) -> None:
        if min(self.distillation, self.cross_entropy, self.alignment) < 0 or self.temperature <= 0:
            raise ConfigError("loss weights must be >= 0 and the temperature > 0")
        if self.rows < 1:
            raise ConfigError(f"rows must be at least 1, found {self.rows}")


class SlowPass:
    """One frozen pass over a batch: residuals at some depths, keys and values for whoever reads them."""

    @torch.no_grad()
    def __init__(self, model: Decoder, batch: TokenBatch) -> None:
        """Run it; ``self.residuals[n]`` is h[n] (B * T, E), ``self.rows`` the positions that count."""
        self.step = Step.dense(*batch.tokens.shape)
        self.rows = batch.predicting
        self.residuals = [model.embed(batch.tokens.reshape(-1), self.step)]
        model.run(self.residuals[0], self.step, watch=lambda _, h: self.residuals.append(h))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts))


class GatesObjective(DecoderObjective):
    """Stage 1."""

    def __init__(self, accelerator: GatedAccelerator, loss: GatesLoss) -> None:
        self.accelerator = accelerator
        self.loss = loss

    def groups(self) -> Sequence[Mapping[str, object]]:
        """All adapter weights, no decay."""
        return [{"params": list(self.accelerator.parameters()), "name": "gates", "weight_decay": 0.0}]

    def losses(self, model: Decoder, batch: TokenBatch) -> Parts:
        """The loss in parts of ``rows`` positions, all gates of each, ready for ``backward``.

        The head runs on copies cut from the graph; the last part sends what they gathered down to the adapters.
        """
        config = self.accelerator.config
        slow, targets = SlowPass(model, batch), batch.targets
        gates = []
        for gate, depth in enumerate(config.layers):
            start = slow.residuals[config.interval(gate)[0]]
            trail = self.accelerator.accelerate(model, gate, start, slow.step, (depth,))
            gates.append(self.accelerator.at_gate(gate, trail[slow.rows, -1]))
        learns = torch.is_grad_enabled()
        cuts = [p.detach().requires_grad_(learns) for p in gates]
        for part in torch.split(torch.arange(len(slow.rows)), self.loss.rows):
            rows = slow.rows[part]
            with torch.no_grad():
                truth = model.head(slow.residuals[-1][rows])
            total, seen = 0 * cuts[0].sum(), {}
            for gate, cut in enumerate(cuts):
                aim = slow.residuals[config.target(gate, model.config.num_layers)][rows]
                loss, agreed = self._gate(model, cut[part], truth, aim, targets[part])
                total = total + loss
                seen[f"agreement_{gate + 1}"] = float(agreed) / len(slow.rows)
            yield total / (len(cuts) * len(slow.rows)), seen
        if learns:
            parts = [(p * cut.grad).sum() for p, cut in zip(gates, cuts, strict=True) if cut.grad is not None]
            assert len(parts) == len(cuts), "back every part through before asking for the next"
            yield torch.stack(parts).sum(), {}

    def _gate(self, model: Decoder, p: Tensor, truth: Tensor, aim: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Summed loss of some positions at one gate, and how many of them agree with the whole model."""
        tau, weights = self.loss.temperature, self.loss
        guess = model.head(p)
        kl = F.kl_div(F.log_softmax(guess / tau, -1), F.log_softmax(truth / tau, -1), reduction="sum", log_target=True)
        ce = F.cross_entropy(guess, targets, reduction="sum")
        away = (1 - F.cosine_similarity(p.float(), aim.float(), dim=-1)).sum()
        loss = weights.distillation * tau**2 * kl + weights.cross_entropy * ce + weights.alignment * away
        return loss, (guess.argmax(-1) == truth.argmax(-1)).sum()


@dataclass(frozen=True)
class Trails:
    """What the routers see of a batch, and what they should say."""

    states: tuple[Tensor, ...]
    """Per gate (n, depths, E)."""
    says: tuple[Tensor, ...]
    """Per gate (n, E): what the head reads there."""
    agrees: Tensor
    """(n, J) bool: the gate's likeliest token is the whole model's."""

    @property
    def num_positions(self) -> int:
        """N."""
        return len(self.agrees)

    def take(self, rows: Tensor) -> Trails:
        """Some of the positions."""
        return Trails(tuple(s[rows] for s in self.states), tuple(p[rows] for p in self.says), self.agrees[rows])

    @staticmethod
    def join(parts: Sequence[Trails]) -> Trails:
        """Those of several batches."""
        states = zip(*(part.states for part in parts), strict=True)
        says = zip(*(part.says for part in parts), strict=True)
        agrees = torch.cat([part.agrees for part in parts])
        return Trails(tuple(map(_joined, states)), tuple(map(_joined, says)), agrees)


@torch.no_grad()
def trails_of(model: Decoder, accelerator: GatedAccelerator, config: RouterConfig, batch: TokenBatch) -> Trails:
    """Trails of a batch's answer positions at every gate, teacher-forced.

    Args:
        model: the frozen decoder.
        accelerator: its trained gates.
        config: where the router looks.
        batch: rows of text.
    """
    gates, slow = accelerator.config, SlowPass(model, batch)
    truth = model.greedy(slow.residuals[-1][slow.rows])
    states, says = [], []
    for gate in range(len(gates.gates)):
        start = slow.residuals[gates.interval(gate)[0]]
        trail = accelerator.accelerate(model, gate, start, slow.step, config.depths(gates, gate))
        states.append(trail[slow.rows])
        says.append(accelerator.at_gate(gate, trail[slow.rows, -1]))
    agrees = torch.stack([model.greedy(p) == truth for p in says], 1)
    return Trails(tuple(states), tuple(says), agrees)


@dataclass(frozen=True)
class RouterLesson:
    """Stage 2 in numbers."""

    epochs: int = 8
    """Times every position is learnt from; what the router sees is computed once."""
    positions: int = 512
    """Per update."""
    rate: float = 0.003
    """Of AdamW; falls in a straight line to zero."""

    def __post_init__(self) -> None:
        if min(self.epochs, self.positions) < 1 or self.rate <= 0:
            raise ConfigError(
                f"epochs and positions must be >= 1 and rate > 0, found {self.epochs}, {self.positions}, {self.rate}"
            )


def fit_router(model: Decoder, router: Router, trails: Trails, lesson: RouterLesson, *, seed: int = 0) -> None:
    """Teach a router, in place, when its gates are right; one without weights is left alone.

    Args:
        model: the frozen decoder.
        router: of the gates that made the trails.
        trails: of rows that the gates have not learnt from.
        lesson: how long and how fast.
        seed: of the order of the positions.
    """
    weights = list(router.parameters())
    if not weights:
        return
    optimiser = torch.optim.AdamW(weights, lr=lesson.rate, weight_decay=0.0)
    order = torch.Generator().manual_seed(seed)
    updates = lesson.epochs * -(-trails.num_positions // lesson.positions)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, updates)
    for _ in range(lesson.epochs):
        for rows in torch.randperm(trails.num_positions, generator=order).split(lesson.positions):
            optimiser.zero_grad()
            router_loss(model, router, trails.take(rows)).backward()
            optimiser.step()
            schedule.step()


def router_loss(model: Decoder, router: Router, trails: Trails) -> Tensor:
    """Mean binary cross-entropy over gates; the rarer answer counts up to ``MAX_WEIGHT`` times."""
    losses = []
    for gate, (states, p) in enumerate(zip(trails.states, trails.says, strict=True)):
        labels = trails.agrees[:, gate].float()
        share = labels.mean().clamp(1e-6, 1 - 1e-6)
        weight = (1 / share - 1).clamp(1 / MAX_WEIGHT, MAX_WEIGHT)
        score = router(gate, states, partial(model.head, p))
        losses.append(F.binary_cross_entropy_with_logits(score, labels, pos_weight=weight))
    return torch.stack(losses).mean()
