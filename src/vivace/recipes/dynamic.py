"""Recipe for dynamic depth (``methods/dynamic``): exit layers, then the router that chooses one, then thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from vivace.decode.depth import ExitPlan, Missing
from vivace.errors import ConfigError
from vivace.methods.dynamic.drafter import DynamicConfig, DynamicWeights
from vivace.methods.dynamic.objective import GatesLoss, GatesObjective, RouterTraining, Trails, fit_router, trails_of
from vivace.methods.dynamic.thresholds import QUALITIES, calibrate, exit_shares, score_all
from vivace.recipes.frozen import FrozenRecipe, Trainable, TrainContext, TrainedAdapter
from vivace.train.variation import Pair


@dataclass(frozen=True, kw_only=True)
class DynamicRecipe(FrozenRecipe):
    """How to train exit layers, then their router, on a frozen base; loop and optimiser are the exit layers'."""

    RENAMED: ClassVar[Mapping[str, str]] = {"lesson": "router_training", "max_late": "max_pending"}
    kind: Literal["dynamic"] = "dynamic"
    router_training: RouterTraining = field(default_factory=RouterTraining)
    """Settings of the router's training, which follows that of the exit layers."""
    adapter: DynamicConfig = field(default_factory=DynamicConfig)
    loss: GatesLoss = field(default_factory=GatesLoss)
    missing: Missing = "deferred"
    """What later tokens read where an early exit left no keys and values: ``deferred``, ``propagate`` or ``mask``."""
    max_pending: int = 8
    """Largest number of tokens of a sequence whose keys and values of the upper layers are pending (``deferred``)."""
    router_rows: int = 2000
    """Number of rows that only the router is trained on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.router_rows < 1:
            raise ConfigError(f"router_rows must be >= 1, found {self.router_rows}")

    @property
    def num_calibration(self) -> int:
        """Number of rows for the router alone; on rows they were trained on, exits agree with the decoder too often."""
        return self.router_rows

    def begin(self, context: TrainContext) -> ExitTraining:
        """Make exit layers that equal the layers of the base, and an untrained router."""
        return ExitTraining(self, context)


class ExitTraining(Trainable):
    """Trains exit layers, then their router, and calibrates the thresholds."""

    def __init__(self, recipe: DynamicRecipe, context: TrainContext) -> None:
        super().__init__(context)
        self.recipe = recipe
        self.weights = DynamicWeights(recipe.adapter, context.engine.model.config).to(context.engine.model.device)
        self.objective = GatesObjective(self.weights.gates, recipe.loss)
        self.depth = recipe.adapter.gates.layers[-1]

    def finish(self) -> TrainedAdapter:
        """Train the router on the finished exit layers, then calibrate thresholds for every agreement target."""
        model, weights, recipe = self.context.engine.model, self.weights, self.recipe
        weights.gates.to(model.dtype)  # the router is trained on the exits in the precision they decode in
        trails = self._trails(self.context.calibration)
        self.context.report.note(f"the router learns from {trails.num_positions} positions")
        fit_router(model, weights.router, trails, recipe.router_training, seed=recipe.seed)
        tensors = {name: value.to(model.dtype) for name, value in weights.tensors().items()}
        weights.load_state_dict(tensors)  # thresholds belong to the weights as they are stored
        return TrainedAdapter(self._calibrated(), recipe.adapter, tensors)

    def _trails(self, pairs: Sequence[Pair]) -> Trails:
        """Return the inputs of the router, and its targets, for some pairs."""
        model, router = self.context.engine.model, self.recipe.adapter.router
        batches = self.context.batches(pairs)
        return Trails.join([trails_of(model, self.weights.gates, router, batch) for batch in batches])

    def _calibrated(self) -> ExitPlan:
        """Calibrate the thresholds on the held-back rows and report the share of tokens that exit early."""
        model = self.context.engine.model
        scores = score_all(model, self.weights.router, self._trails(self.context.held_back))
        minimum_exit_share = self.recipe.adapter.gates.minimum_exit_share(model.config.num_layers)
        plans = tuple(calibrate(scores, quality, minimum_exit_share=minimum_exit_share) for quality in QUALITIES)
        for plan in plans:
            shares = ", ".join(f"{share:.0%}" for share in exit_shares(scores, plan))
            self.context.report.note(f"at agreement {plan.quality:g}: {shares} of the tokens leave at the gates")
        return ExitPlan(plans, self.recipe.missing, self.recipe.max_pending)
