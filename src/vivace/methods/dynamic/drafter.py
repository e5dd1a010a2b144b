"""Dynamic depth with accelerated residuals: a token exits where its router is confident enough (``--method dynamic``).

Every row that may exit has an accelerated row beside it up to the next exit layer. The router reads the accelerated
row's residuals on the way; where its score exceeds the threshold of the quality asked for, the token is read there.
``decode/depth.py`` handles the missing entries above the exit. The method is lossy: exits, and how often they agree
with the whole model, are always reported.
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
from vivace.decode.depth import Depth, EarlyExit, ExitPlan, ExitThresholds
from vivace.decode.plain import NoDrafts
from vivace.errors import ConfigError
from vivace.methods.dynamic.gates import GatedAccelerator, GatesConfig
from vivace.methods.dynamic.router import RouterConfig, make_router


@dataclass(frozen=True)
class DynamicConfig:
    """Config of the weights."""

    gates: GatesConfig = field(default_factory=GatesConfig)
    router: RouterConfig = field(default_factory=RouterConfig)


class DynamicWeights(Trained):
    """Accelerated residuals and router of one adapter."""

    def __init__(self, config: DynamicConfig, model: ModelConfig) -> None:
        """Make untrained weights.

        Raises:
            ConfigError: they do not fit the model.
        """
        super().__init__()
        self.config = config
        self.gates = GatedAccelerator(config.gates, model)
        self.router = make_router(config.router, config.gates, model.width)


class AcceleratedExit:
    """Implements ``ExitPolicy``: the router's score of the accelerated residual decides."""

    def __init__(self, weights: DynamicWeights, plan: ExitThresholds) -> None:
        """Decide with trained weights.

        Raises:
            ConfigError: the plan has thresholds for another number of exit layers.
        """
        config = weights.config
        if len(plan.thresholds) != len(config.gates.gates):
            raise ConfigError(f"{len(plan.thresholds)} thresholds for {len(config.gates.gates)} gates")
        self.accelerator = weights.gates
        self.router = weights.router
        self._open = [(gate, at) for gate, at in enumerate(plan.thresholds) if at is not None]
        """Index and threshold of each exit layer that has one; at the others no row exits."""
        self.exit_layers = tuple(config.gates.layers[gate] for gate, _ in self._open)
        self._depths = [config.router.depths(config.gates, gate) for gate, _ in self._open]

    def forward(self, model: Decoder, index: int, h: Tensor, step: Step, asking: Tensor) -> EarlyExit:
        """Run the model's rows to the exit layer, in its own interval with accelerated rows beside the asking ones."""
        number, threshold = self._open[index]
        low = self.exit_layers[index - 1] if index else 0
        start, stop = self.accelerator.config.interval(number)
        if len(asking) == 0:
            h = model.run(h, step, low, stop)
            return EarlyExit(h, torch.zeros(0, dtype=torch.bool, device=h.device), h[asking])
        h = h if low == start else model.run(h, step, low, start)
        h, trail = self.accelerator.forward(model, number, h, step, asking, self._depths[index])
        exit_hidden = self.accelerator.at_gate(number, trail[:, -1])
        score = self.router.score(number, trail, lambda: model.head(exit_hidden, row_count=step.row_count))
        return EarlyExit(h, score > threshold, exit_hidden, stop - start)


class DynamicDepth(NoDrafts):
    """Implements ``Drafter``: drafts nothing, and runs each token only as far as its router requires."""

    name = "dynamic"

    def __init__(self, weights: DynamicWeights, plan: ExitPlan, quality: float | None = None) -> None:
        """Decode with trained weights.

        Args:
            weights: trained on this model.
            plan: thresholds, and what replaces missing entries.
            quality: the stated agreement; None stands for the default one.

        Raises:
            ConfigError: there are no thresholds for it.
        """
        chosen = plan.at(quality)
        self.quality = chosen.quality
        self.weights = weights
        self.policy = AcceleratedExit(weights, chosen)
        self.traversal: Traversal = Depth(self.policy, missing=plan.missing, max_pending=plan.max_pending)
