"""Training foresight (``multirate/foresight.py``): what tells which experts will be needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vivace.multirate.foresight import Foresight, ForesightConfig, ForesightLoss, ForesightObjective, ForesightPlan
from vivace.training.frozen import FrozenRecipe, Ground, Outcome


@dataclass(frozen=True, kw_only=True)
class ForesightRecipe(FrozenRecipe):
    """How to train foresight on a frozen mixture of experts."""

    kind: Literal["foresight"] = "foresight"
    adapter: ForesightConfig = field(default_factory=ForesightConfig)
    loss: ForesightLoss = field(default_factory=ForesightLoss)
    plan: ForesightPlan = field(default_factory=ForesightPlan)
    """How decoding uses it, saved with the weights."""

    def begin(self, ground: Ground) -> ForesightTraining:
        """Weights that were not trained."""
        return ForesightTraining(self, ground)


class ForesightTraining:
    """Fills ``Trainee``."""

    def __init__(self, recipe: ForesightRecipe, ground: Ground) -> None:
        model = ground.engine.model.config
        self.recipe = recipe
        self.foresight = Foresight(recipe.adapter, model)
        self.objective = ForesightObjective(self.foresight, recipe.loss)
        self.depth = max(1, recipe.adapter.depth(model.num_layers))

    def finish(self) -> Outcome:
        """The weights as they are."""
        tensors = {name: value.detach() for name, value in self.foresight.state_dict().items()}
        return Outcome(self.recipe.plan, self.recipe.adapter, tensors)
