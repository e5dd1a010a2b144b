"""Exits by confidence (``methods/confidence``) calibrated on a model as it is, the learned measure trained."""

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
"""Stated agreements that thresholds are found for."""


@dataclass(frozen=True, kw_only=True)
class ConfidenceRecipe(FrozenRecipe):
    """Which measure, at which gates."""

    kind: Literal["calm", "lite"]
    adapter: ConfidenceConfig = field(default_factory=ConfidenceConfig)
    missing: Missing = "propagate"
    """What stands for the entries above an exit: ``deferred``, ``propagate`` or ``mask``."""
    tokens_per_batch: int = 2048

    def begin(self, context: TrainContext) -> ConfidenceTraining:
        """A measure that has learnt nothing; only ``learned`` has something to learn."""
        return ConfidenceTraining(self, context)


class ConfidenceTraining(Trainable):
    """A measure of confidence in training, and thresholds for any measure."""

    def __init__(self, recipe: ConfidenceRecipe, context: TrainContext) -> None:
        super().__init__(context)
        self.recipe = recipe
        self.weights = Confidence(recipe.adapter, context.engine.model.config)
        self.objective = ConfidenceObjective(self.weights) if recipe.adapter.measure == "learned" else None

    def finish(self) -> TrainedAdapter:
        """Thresholds found on the held-back rows."""
        model = self.context.engine.model
        self.weights.to(model.dtype)  # thresholds belong to the weights as they are stored
        told = confidence_scores(model, self.weights, self.context.batches(self.context.held_back))
        plans = tuple(calibrated(told, quality) for quality in QUALITIES)
        for plan in plans:
            shown = ", ".join("shut" if at is None else f"{at:.3f}" for at in plan.thresholds)
            self.context.report.note(f"at agreement {plan.quality:g} the gates open above {shown}")
        return TrainedAdapter(ConfidencePlan(plans, self.recipe.missing), self.recipe.adapter, self.weights.tensors())
