"""Dynamic depth by the accelerated residual: a token leaves where its router is sure enough (``--method dynamic``).

Every row that may leave gets an accelerated companion up to the next gate. The router reads the companion's trail;
above the threshold of the quality asked for, the gate's own guess is the token. What happens to the entries above the
gate is ``decode/depth.py``'s matter. Lossy by nature: exits, and how often they agree, are always reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vivace.core.config import ModelConfig
from vivace.core.model import Decoder
from vivace.core.seams import Traversal
from vivace.core.step import Step
from vivace.core.trained import Trained
from vivace.decode.depth import Depth, EarlyExit, Missing, at_quality
from vivace.decode.plain import NoDrafts
from vivace.errors import ConfigError
from vivace.methods.dynamic.gates import GatedAccelerator, GatesConfig
from vivace.methods.dynamic.router import RouterConfig, make_router
from vivace.methods.dynamic.thresholds import QualityPlan


@dataclass(frozen=True)
class DynamicConfig:
    """What the weights are of."""

    gates: GatesConfig = field(default_factory=GatesConfig)
    router: RouterConfig = field(default_factory=RouterConfig)


@dataclass(frozen=True)
class DynamicPlan:
    """How to decode with them, saved next to the weights."""

    qualities: tuple[QualityPlan, ...]
    """Thresholds by stated agreement, found on held-back text."""
    missing: Missing = "deferred"
    """What stands for the keys and values above an exit: ``deferred``, ``propagate`` or ``mask``."""
    max_late: int = 8
    """Tokens of a sequence that may wait for their upper layers."""

    def at(self, quality: float | None) -> QualityPlan:
        """The thresholds for an agreement; None is the default one.

        Raises:
            ConfigError: the adapter was not calibrated to it.
        """
        return at_quality(self.qualities, quality)


class DynamicWeights(Trained):
    """Gates and router of one adapter."""

    def __init__(self, config: DynamicConfig, model: ModelConfig) -> None:
        """Make untrained ones.

        Raises:
            ConfigError: they do not fit the model.
        """
        super().__init__()
        self.config = config
        self.gates = GatedAccelerator(config.gates, model)
        self.router = make_router(config.router, config.gates, model.width)


class AcceleratedExit:
    """Fills ``ExitPolicy``: the router's word on the accelerated residual's trail."""

    def __init__(self, weights: DynamicWeights, plan: QualityPlan) -> None:
        """Decide by trained weights.

        Raises:
            ConfigError: the plan has thresholds for another number of gates.
        """
        config = weights.config
        if len(plan.thresholds) != len(config.gates.gates):
            raise ConfigError(f"{len(plan.thresholds)} thresholds for {len(config.gates.gates)} gates")
        self.accelerator = weights.gates
        self.router = weights.router
        self._open = [(gate, at) for gate, at in enumerate(plan.thresholds) if at is not None]
        """Gate by its number in the adapter, and its threshold; rows go past a shut one as past any layer."""
        self.gates = tuple(config.gates.layers[gate] for gate, _ in self._open)
        self._depths = [config.router.depths(config.gates, gate) for gate, _ in self._open]

    def forward(self, model: Decoder, gate: int, h: Tensor, step: Step, asking: Tensor) -> EarlyExit:
        """Slow rows to the gate, in its own interval with companions of the asking ones."""
        number, threshold = self._open[gate]
        low = self.gates[gate - 1] if gate else 0
        start, stop = self.accelerator.config.interval(number)
        if len(asking) == 0:
            h = model.run(h, step, low, stop)
            return EarlyExit(h, torch.zeros(0, dtype=torch.bool, device=h.device), h[asking])
        h = h if low == start else model.run(h, step, low, start)
        h, trail = self.accelerator.forward(model, number, h, step, asking, self._depths[gate])
        says = self.accelerator.at_gate(number, trail[:, -1])
        score = self.router.score(number, trail, lambda: model.head(says, row_count=step.row_count))
        return EarlyExit(h, score > threshold, says, stop - start)


class DynamicDepth(NoDrafts):
    """Fills ``Drafter``: guesses nothing, and climbs only as far as need be."""

    name = "dynamic"

    def __init__(self, weights: DynamicWeights, plan: DynamicPlan, quality: float | None = None) -> None:
        """Decode with trained weights.

        Args:
            weights: of this model.
            plan: thresholds, and what stands for missing entries.
            quality: the stated agreement; None is the default one.

        Raises:
            ConfigError: there are no thresholds for it.
        """
        chosen = plan.at(quality)
        self.quality = chosen.quality
        self.weights = weights
        self.policy = AcceleratedExit(weights, chosen)
        self.traversal: Traversal = Depth(self.policy, missing=plan.missing, max_late=plan.max_late)
