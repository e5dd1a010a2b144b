"""Training the rivals that draft beside a frozen base (``baselines/``)."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import Any, Literal

from vivace.baselines.eagle import EagleConfig
from vivace.baselines.exits import ExitConfig
from vivace.baselines.medusa import MedusaConfig, MedusaHeads, MedusaPlan
from vivace.baselines.objectives import RivalLoss
from vivace.baselines.uno import UnoConfig
from vivace.core.trained import Trained
from vivace.decode.shallow import DraftPlan
from vivace.methods.composition import stored_of
from vivace.recipes.frozen import FrozenRecipe, Trainable, TrainContext, TrainedAdapter


@dataclass(frozen=True, kw_only=True)
class RivalRecipe(FrozenRecipe):
    """What all of them have; the same data, loop and teacher for every method."""

    adapter: Any
    loss: RivalLoss = field(default_factory=RivalLoss)
    plan: Any
    """Shape of the draft, saved with the weights."""
    tokens_per_batch: int = 2048

    def begin(self, context: TrainContext) -> RivalTraining:
        """Weights that have learnt nothing, in the model's own precision; the optimiser has masters."""
        model = context.engine.model
        make = stored_of(self.kind).weights
        assert make is not None, f"{self.kind} has no weights"
        weights = make(self.adapter, model.config)
        if isinstance(weights, MedusaHeads):
            weights.start_from(model)
        return RivalTraining(self, context, weights.to(model.dtype))


@dataclass(frozen=True, kw_only=True)
class MedusaRecipe(RivalRecipe):
    """How to train Medusa's heads."""

    kind: Literal["medusa"] = "medusa"
    adapter: MedusaConfig = field(default_factory=MedusaConfig)
    plan: MedusaPlan = field(default_factory=MedusaPlan)


@dataclass(frozen=True, kw_only=True)
class EagleRecipe(RivalRecipe):
    """How to train a feature drafter."""

    kind: Literal["eagle"] = "eagle"
    adapter: EagleConfig = field(default_factory=EagleConfig)
    plan: DraftPlan = field(default_factory=DraftPlan)


@dataclass(frozen=True, kw_only=True)
class DeedRecipe(RivalRecipe):
    """How to train an early exit with an adaptation module."""

    kind: Literal["deed"] = "deed"
    adapter: ExitConfig = field(default_factory=lambda: ExitConfig(bottleneck=256))
    plan: DraftPlan = field(default_factory=DraftPlan)


@dataclass(frozen=True, kw_only=True)
class UnoRecipe(RivalRecipe):
    """How to train the terms that draft a block."""

    kind: Literal["uno"] = "uno"
    adapter: UnoConfig = field(default_factory=UnoConfig)
    plan: MedusaPlan = field(default_factory=lambda: MedusaPlan((1,) * 4))


def common_recipe(kind: str) -> type[RivalRecipe]:
    """The recipe of a method from what its spec says of its files: their config and plan, each with its defaults."""
    stored = stored_of(kind)
    fields: list[tuple[str, Any, Any]] = [
        ("kind", str, field(default=kind)),
        ("adapter", stored.config, field(default_factory=stored.config)),
        ("plan", stored.plan, field(default_factory=stored.plan)),
    ]
    return make_dataclass(f"{kind.capitalize()}Recipe", fields, bases=(RivalRecipe,), frozen=True, kw_only=True)


class RivalTraining(Trainable):
    """A rival in training."""

    def __init__(self, recipe: RivalRecipe, context: TrainContext, weights: Trained) -> None:
        super().__init__(context)
        self.recipe = recipe
        self.weights = weights
        objective = stored_of(recipe.kind).objective
        assert objective is not None, f"{recipe.kind} has no objective of its own"
        self.objective = objective(weights, recipe.loss)
        self.depth = weights.depth

    def finish(self) -> TrainedAdapter:
        """The weights, with the draft that the recipe gives."""
        return TrainedAdapter(self.recipe.plan, self.recipe.adapter, self.weights.tensors())
