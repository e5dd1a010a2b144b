"""Training speculative streams (``multistream/``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vivace.multistream.config import MultistreamConfig, StreamPlan
from vivace.multistream.objective import MultistreamLoss, MultistreamObjective
from vivace.multistream.streams import Streams
from vivace.training.frozen import FrozenRecipe, Ground, Outcome


@dataclass(frozen=True, kw_only=True)
class MultistreamRecipe(FrozenRecipe):
    """How to train speculative streams on a frozen base."""

    kind: Literal["multistream"] = "multistream"
    adapter: MultistreamConfig = field(default_factory=MultistreamConfig)
    loss: MultistreamLoss = field(default_factory=MultistreamLoss)
    plan: StreamPlan = field(default_factory=StreamPlan)
    """Shape of the draft, saved with the weights."""
    tokens_per_batch: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        self.plan.check_fits(self.adapter)

    def begin(self, ground: Ground) -> StreamTraining:
        """Streams that have learnt nothing."""
        model = ground.engine.model.config
        return StreamTraining(self, Streams(self.adapter, model), model.num_layers, model.width)


class StreamTraining:
    """Fills ``Trainee``."""

    def __init__(self, recipe: MultistreamRecipe, streams: Streams, num_layers: int, width: int) -> None:
        self.recipe = recipe
        self.streams = streams
        self.width = width
        self.objective = MultistreamObjective(streams, recipe.loss)
        self.depth = (num_layers - recipe.adapter.insertion) * recipe.adapter.streams

    def finish(self) -> Outcome:
        """The weights, with the draft that the recipe gives."""
        own = self.recipe.adapter.num_paper_parameters(self.width)
        note = f", {own:,} of them embeddings and pruner as the paper counts"
        return Outcome(self.recipe.plan, self.recipe.adapter, self.streams.tensors(), note)
