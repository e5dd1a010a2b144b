"""Recipe for early exits by confidence (CALM, LITE): thresholds for a model as it is, and a learned measure if any."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vivace.decode.depth import Missing
from vivace.methods.confidence.drafter import (
    Confidence,
    ConfidenceConfig,
    ConfidenceObjective,
    ConfidencePlan,
    calibrated,
    confidence_scores,
)
from vivace.recipes.frozen import FrozenRecipe, Trainable, TrainContext, TrainedAdapter

QUALITIES = (0.9, 0.95, 0.98, 0.99)
"""Agreement targets: shares of tokens equal to the full model's, for each of which thresholds are calibrated."""


@dataclass(frozen=True, kw_only=True)
class ConfidenceRecipe(FrozenRecipe):
    """How to calibrate, and where it is learned train, a measure of confidence at the exit layers."""

    kind: Literal["calm", "lite"]
    adapter: ConfidenceConfig = field(default_factory=ConfidenceConfig)
    missing: Missing = "propagate"
    """What later tokens read where an early exit left no keys and values: ``deferred``, ``propagate`` or ``mask``."""
    tokens_per_batch: int = 2048

    def begin(self, context: TrainContext) -> ConfidenceTraining:
        """Make an untrained measure; only the measure ``learned`` has weights to train."""
        return ConfidenceTraining(self, context)


class ConfidenceTraining(Trainable):
    """Trains a measure of confidence if it has weights, and calibrates its thresholds."""

    def __init__(self, recipe: ConfidenceRecipe, context: TrainContext) -> None:
        super().__init__(context)
        self.recipe = recipe
        self.weights = Confidence(recipe.adapter, context.engine.model.config).to(context.engine.model.device)
        self.objective = ConfidenceObjective(self.weights) if recipe.adapter.measure == "learned" else None

    def finish(self) -> TrainedAdapter:
        """Return the weights with thresholds that were calibrated on the held-back rows."""
        model = self.context.engine.model
        self.weights.to(model.dtype)  # thresholds belong to the weights as they are stored
        scores = confidence_scores(model, self.weights, self.context.batches(self.context.held_back))
        plans = tuple(calibrated(scores, quality) for quality in QUALITIES)
        for plan in plans:
            shown = ", ".join("shut" if at is None else f"{at:.3f}" for at in plan.thresholds)
            self.context.report.note(f"at agreement {plan.quality:g} the gates open above {shown}")
        return TrainedAdapter(ConfidencePlan(plans, self.recipe.missing), self.recipe.adapter, self.weights.tensors())
