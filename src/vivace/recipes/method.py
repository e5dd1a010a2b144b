"""The common recipe of methods whose ``MethodSpec`` describes everything that their training needs."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any

from vivace.core.trained import Trained
from vivace.errors import ConfigError
from vivace.methods.composition import stored_of
from vivace.recipes.frozen import FrozenRecipe, Trainable, TrainContext, TrainedAdapter
from vivace.train.distillation import DistillationLoss


@dataclass(frozen=True, kw_only=True)
class MethodRecipe(FrozenRecipe):
    """How to train the weights of such a method: with the same data, loop and teacher for every method."""

    adapter: Any
    """Configuration of the weights."""
    loss: Any
    """Settings of the method's objective."""
    plan: Any
    """How decoding drafts with the weights, saved with them. Where it names a size of the draft vocabulary, only so
    many tokens are learnt to be guessed. None stands for the method's own, no deeper than the weights."""
    tokens_per_batch: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        stored = stored_of(self.kind)
        deepest = None if stored.deepest is None else getattr(self.adapter, stored.deepest)
        if self.plan is None:
            plan = (stored.trained_plan or stored.plan)()
            fitting = plan if deepest is None else replace(plan, widths=plan.widths[:deepest])
            object.__setattr__(self, "plan", fitting)
        elif deepest is not None and len(self.plan.widths) > deepest:
            raise ConfigError(
                f"plan.widths {list(self.plan.widths)} go deeper than adapter.{stored.deepest} {deepest}; shorten the "
                f"widths, or raise adapter.{stored.deepest}"
            )

    def begin(self, context: TrainContext) -> MethodTraining:
        """Make untrained weights in the decoder's precision; the optimiser keeps float32 copies."""
        model = context.engine.model
        make = stored_of(self.kind).weights
        assert make is not None, f"{self.kind} has no weights"
        weights = make(self.adapter, model.config)
        weights.start_from(model)
        return MethodTraining(self, context, weights.to(model.device, model.dtype))


def method_recipe(kind: str) -> type[MethodRecipe]:
    """Make the recipe class of a method from its spec: the fields ``adapter``, ``loss`` and ``plan`` with defaults."""
    stored = stored_of(kind)
    loss = stored.loss or DistillationLoss
    fields: list[tuple[str, Any, Any]] = [
        ("kind", str, field(default=kind)),
        ("adapter", stored.config, field(default_factory=stored.trained_config or stored.config)),
        ("loss", loss, field(default_factory=loss)),
        ("plan", stored.plan | None, field(default=None)),
    ]
    return make_dataclass(f"{kind.capitalize()}Recipe", fields, bases=(MethodRecipe,), frozen=True, kw_only=True)


class MethodTraining(Trainable):
    """Trains the weights of a method with the objective that its spec names."""

    def __init__(self, recipe: MethodRecipe, context: TrainContext, weights: Trained) -> None:
        super().__init__(context)
        self.recipe = recipe
        self.weights = weights
        objective = stored_of(recipe.kind).objective
        assert objective is not None, f"{recipe.kind} has no objective of its own"
        self.objective = objective(weights, recipe.loss, context.draft_head(recipe.plan.vocabulary))
        self.depth = weights.depth

    def finish(self) -> TrainedAdapter:
        """Return the trained weights with the recipe's plan."""
        return TrainedAdapter(self.recipe.plan, self.recipe.adapter, self.weights.tensors())
