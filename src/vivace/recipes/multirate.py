"""Recipe for an accelerated residual, which drafts from an exit layer (``methods/multirate``)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from vivace.core.config import ModelConfig
from vivace.decode.shallow import DraftPlan
from vivace.methods.multirate.config import MultirateConfig
from vivace.methods.multirate.objective import MultirateLoss, MultirateObjective
from vivace.methods.multirate.reach import copying_layers
from vivace.methods.multirate.residual import Accelerator
from vivace.recipes.frozen import FrozenRecipe, Trainable, TrainContext, TrainedAdapter

PROBED = 8
"""Number of held-back batches in which layers that copy from the text are searched for."""


@dataclass(frozen=True, kw_only=True)
class MultirateRecipe(FrozenRecipe):
    """How to train an accelerated residual on a frozen base."""

    kind: Literal["multirate"] = "multirate"
    adapter: MultirateConfig = field(default_factory=MultirateConfig)
    find_reach: int = 0
    """Number of layers that copy from the text to find for ``adapter.reach`` where it is empty; 0 leaves it empty."""
    loss: MultirateLoss = field(default_factory=MultirateLoss)
    plan: DraftPlan = field(default_factory=DraftPlan)
    """Shape of the draft that decoding makes, saved with the weights. Where it names a size of the draft vocabulary,
    only so many tokens are learnt to be guessed, the most frequent ones of the text; that is faster, too."""

    def without_search(self, model: ModelConfig) -> MultirateRecipe:
        """Return the recipe with the highest layers in the place of those that copy."""
        count = min(self.find_reach, self.adapter.exit_layer, model.num_layers - self.adapter.exit_layer)
        if self.adapter.reach or count < 1:
            return self
        return replace(self, adapter=replace(self.adapter, reach=tuple(range(model.num_layers))[-count:]))

    def begin(self, context: TrainContext) -> AcceleratorTraining:
        """Make an accelerator that changes nothing yet; find the deep layers it reads unless the recipe names them."""
        model, config = context.engine.model, self.adapter
        if self.find_reach and not config.reach:
            found = copying_layers(
                model,
                context.batches(context.held_back)[:PROBED],
                config.exit_layer,
                min(self.find_reach, config.exit_layer),
            )
            context.report.note(f"layers that copy, and that will be read while drafting: {', '.join(map(str, found))}")
            config = replace(config, reach=found)
        accelerator = Accelerator(config, model.config).to(model.device)
        for reach in accelerator.reaches():
            reach.start_from(model)
        return AcceleratorTraining(self, context, accelerator)


class AcceleratorTraining(Trainable):
    """Trains an accelerator."""

    def __init__(self, recipe: MultirateRecipe, context: TrainContext, accelerator: Accelerator) -> None:
        super().__init__(context)
        self.recipe = recipe
        self.accelerator = accelerator
        self.objective = MultirateObjective(accelerator, recipe.loss, context.draft_head(recipe.plan.vocabulary))
        self.depth = accelerator.config.exit_layer

    def finish(self) -> TrainedAdapter:
        """Return the trained weights with the recipe's plan."""
        return TrainedAdapter(self.recipe.plan, self.accelerator.config, self.accelerator.tensors())
