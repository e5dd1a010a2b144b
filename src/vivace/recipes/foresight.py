"""Recipe for foresight (``storage/experts/foresight``): predictors of the experts that a mixture will need."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from vivace.recipes.frozen import FrozenRecipe, SavedTraining, Trainable, TrainContext, TrainedAdapter
from vivace.storage.experts.foresight.config import ForesightConfig, ForesightLoss, ForesightPlan
from vivace.storage.experts.foresight.objective import ForesightObjective
from vivace.storage.experts.foresight.weights import Foresight


@dataclass(frozen=True, kw_only=True)
class ForesightRecipe(FrozenRecipe):
    """How to train foresight on a frozen mixture of experts."""

    kind: Literal["foresight"] = "foresight"
    adapter: ForesightConfig = field(default_factory=ForesightConfig)
    loss: ForesightLoss = field(default_factory=ForesightLoss)
    plan: ForesightPlan = field(default_factory=ForesightPlan)
    """How decoding uses the predictions, saved with the weights."""

    def begin(self, context: TrainContext) -> ForesightTraining:
        """Make untrained predictors."""
        return ForesightTraining(self, context)


class ForesightTraining(Trainable):
    """Trains foresight."""

    def __init__(self, recipe: ForesightRecipe, context: TrainContext) -> None:
        super().__init__(context)
        model = context.engine.model.config
        self.recipe = recipe
        self.foresight = Foresight(recipe.adapter, model).to(context.engine.model.device)
        self.objective = ForesightObjective(self.foresight, recipe.loss)
        self.depth = max(1, recipe.adapter.depth(model.num_layers))

    def finish(self) -> TrainedAdapter:
        """Return the trained weights."""
        return TrainedAdapter(self.recipe.plan, self.recipe.adapter, self.foresight.tensors())

    def save(self, out: Path, base: str) -> SavedTraining:
        """Write the weights. Beside experts in memory they are not timed, since nothing is left to load ahead."""
        saved = super().save(out, base)
        if self.context.engine.storage is not None:
            return saved
        note = "; they load experts ahead of time from a store: vivace convert STORE --store, then --memory SIZE"
        return replace(saved, method=None, load=None, note=saved.note + note)
