"""Training dynamic depth (``methods/dynamic``): gates, then the router that opens them, then thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from vivace.decode.depth import Missing
from vivace.errors import ConfigError
from vivace.methods.dynamic.drafter import DynamicConfig, DynamicPlan, DynamicWeights
from vivace.methods.dynamic.objective import GatesLoss, GatesObjective, RouterTraining, Trails, fit_router, trails_of
from vivace.methods.dynamic.thresholds import QUALITIES, calibrate, exit_shares, score_all
from vivace.recipes.frozen import FrozenRecipe, Trainable, TrainContext, TrainedAdapter
from vivace.train.variation import Pair


@dataclass(frozen=True, kw_only=True)
class DynamicRecipe(FrozenRecipe):
    """How to train gates and the router that opens them on a frozen base; the loop is the gates'."""

    kind: Literal["dynamic"] = "dynamic"
    lesson: RouterTraining = field(default_factory=RouterTraining)
    """Of the router, after the gates."""
    adapter: DynamicConfig = field(default_factory=DynamicConfig)
    loss: GatesLoss = field(default_factory=GatesLoss)
    missing: Missing = "deferred"
    """What stands for the entries above an exit when decoding: ``deferred``, ``propagate`` or ``mask``."""
    max_late: int = 8
    """Tokens of a sequence that may wait for their upper layers."""
    router_rows: int = 2000
    """Further rows that only the router learns from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.router_rows < 1:
            raise ConfigError(f"router_rows must be >= 1, found {self.router_rows}")

    @property
    def num_calibration(self) -> int:
        """Count the router's rows: the gates are surer of what they have seen."""
        return self.router_rows

    def begin(self, context: TrainContext) -> ExitTraining:
        """Gates that are the slow stream, and a router that knows nothing."""
        return ExitTraining(self, context)


class ExitTraining(Trainable):
    """Gates in training, and what follows it."""

    def __init__(self, recipe: DynamicRecipe, context: TrainContext) -> None:
        super().__init__(context)
        self.recipe = recipe
        self.weights = DynamicWeights(recipe.adapter, context.engine.model.config)
        self.objective = GatesObjective(self.weights.gates, recipe.loss)
        self.depth = recipe.adapter.gates.layers[-1]

    def finish(self) -> TrainedAdapter:
        """Train the router on the finished gates, then set the thresholds for every stated agreement."""
        model, weights, recipe = self.context.engine.model, self.weights, self.recipe
        weights.gates.to(model.dtype)  # the router judges what will decode
        trails = self._trails(self.context.calibration)
        self.context.report.note(f"the router learns from {trails.num_positions} positions")
        fit_router(model, weights.router, trails, recipe.lesson, seed=recipe.seed)
        tensors = {name: value.to(model.dtype) for name, value in weights.tensors().items()}
        weights.load_state_dict(tensors)  # thresholds belong to the weights as they are stored
        return TrainedAdapter(self._calibrated(), recipe.adapter, tensors)

    def _trails(self, pairs: Sequence[Pair]) -> Trails:
        """What the router sees of some rows."""
        model, router = self.context.engine.model, self.recipe.adapter.router
        batches = self.context.batches(pairs)
        return Trails.join([trails_of(model, self.weights.gates, router, batch) for batch in batches])

    def _calibrated(self) -> DynamicPlan:
        """Thresholds; says how many tokens would leave."""
        model = self.context.engine.model
        scores = score_all(model, self.weights.router, self._trails(self.context.held_back))
        minimum_exit_share = self.recipe.adapter.gates.minimum_exit_share(model.config.num_layers)
        plans = tuple(calibrate(scores, quality, minimum_exit_share=minimum_exit_share) for quality in QUALITIES)
        for plan in plans:
            shares = ", ".join(f"{share:.0%}" for share in exit_shares(scores, plan))
            self.context.report.note(f"at agreement {plan.quality:g}: {shares} of the tokens leave at the gates")
        return DynamicPlan(plans, self.recipe.missing, self.recipe.max_late)
