"""Recipe for an accelerated residual, which drafts from an exit layer (``methods/multirate``)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from vivace.checkpoint.adapters import base_hash
from vivace.core.config import ModelConfig
from vivace.decode.shallow import DraftPlan
from vivace.errors import ConfigError
from vivace.methods.composition import read_adapter, trained
from vivace.methods.multirate.config import MultirateConfig
from vivace.methods.multirate.objective import MultirateLoss, MultirateObjective
from vivace.methods.multirate.reach import copying_layers
from vivace.methods.multirate.residual import Accelerator
from vivace.recipes.exit_search import search_exit
from vivace.recipes.frozen import ZERO, FrozenRecipe, Trainable, TrainContext, TrainedAdapter

BASE = "base"
"""Word for beginning with the weights that the base has already."""
PROBED = 8
"""Number of held-back batches in which layers that copy from the text are searched for."""


@dataclass(frozen=True, kw_only=True)
class MultirateRecipe(FrozenRecipe):
    """How to train an accelerated residual on a frozen base."""

    kind: Literal["multirate"] = "multirate"
    adapter: MultirateConfig = field(default_factory=MultirateConfig)
    find_reach: int = 0
    """Number of layers that copy from the text to find for ``adapter.reach`` where it is empty; 0 leaves it empty."""
    find_exit: tuple[int, ...] = ()
    """Exit layers that are tried for ``find_steps`` steps each, in turn; what promises most (``exit_search.py``)
    is trained on. Empty trains ``adapter.exit_layer``."""
    find_steps: int = 40
    """Optimiser steps, of one batch each, for every exit layer that is tried, before the loop's own."""
    loss: MultirateLoss = field(default_factory=MultirateLoss)
    init: str = ZERO
    """What it begins with: "zero", which changes nothing, "base" for the weights in ``adapters/multirate`` of the base,
    or a folder of such weights for the same base. Their own shape holds, whatever ``adapter`` says: over a LoRA, or on
    other text, little is left to learn then."""
    plan: DraftPlan = field(default_factory=DraftPlan)
    """Shape of the draft that decoding makes, saved with the weights. Where it names a size of the draft vocabulary,
    only so many tokens are learnt to be guessed, the most frequent ones of the text; that is faster, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.find_steps < 1 or min(self.find_exit, default=1) < 1:
            raise ConfigError(
                f"find_exit names layers from 1 and find_steps is at least 1, found {list(self.find_exit)} and "
                f"{self.find_steps}"
            )
        if self.init != ZERO and self.find_exit:
            raise ConfigError(f"init={self.init} brings its exit layer along; leave find_exit out")

    def without_search(self, model: ModelConfig) -> MultirateRecipe:
        """Return the recipe with the highest exit layer that is tried, and the highest layers in the place of those
        that copy.
        """
        adapter = replace(self.adapter, exit_layer=max(self.find_exit, default=self.adapter.exit_layer))
        found = replace(self, find_exit=(), adapter=adapter)
        count = min(self.find_reach, adapter.exit_layer, model.num_layers - adapter.exit_layer)
        if adapter.reach or count < 1:
            return found
        return replace(found, adapter=replace(adapter, reach=tuple(range(model.num_layers))[-count:]))

    def begin(self, context: TrainContext) -> AcceleratorTraining:
        """Make an accelerator that changes nothing yet, or has learnt while its exit layer was searched for, or before.

        Raises:
            ConfigError: without ``autocast`` weights in float32 would meet residuals in another dtype.
            CheckpointError: the weights to begin with are missing, broken or of another base or method.
        """
        dtype = context.engine.model.dtype
        if not self.loop.autocast and dtype != torch.float32:
            kind = str(dtype).removeprefix("torch.")
            raise ConfigError(f"autocast=false trains beside weights in float32, this model's are {kind}; leave it out")
        if self.init != ZERO:
            return self._begun(context)
        if not self.find_exit:
            return self._untrained(context)
        candidates = {layer: self._at(layer)._untrained(context) for layer in sorted(set(self.find_exit))}
        for trainable in candidates.values():
            context.require_memory(trainable)
        best = search_exit(context, candidates, self.plan, self.find_steps)[0]
        context.report.note(f"exit layer {best.exit_layer} is trained on")
        return candidates[best.exit_layer]

    def _begun(self, context: TrainContext) -> AcceleratorTraining:
        """Make an accelerator of weights that were trained before, in their own shape."""
        engine = context.engine
        folder = engine.folder / "adapters" / self.kind if self.init == BASE else Path(self.init)
        written, tensors = read_adapter(self.kind, folder, base_hash(engine.folder))
        accelerator: Accelerator = trained(folder, written, tensors, engine.model.config)[0].requires_grad_()
        config = accelerator.config
        shape = f"exit layer {config.exit_layer}, rank {config.rank}, bottleneck {config.bottleneck}"
        context.report.note(f"begins with {folder} and its shape: {shape}")
        return AcceleratorTraining(self, context, accelerator.to(engine.model.device))

    def _at(self, exit_layer: int) -> MultirateRecipe:
        """Return the recipe with one exit layer."""
        return replace(self, find_exit=(), adapter=replace(self.adapter, exit_layer=exit_layer))

    def _untrained(self, context: TrainContext) -> AcceleratorTraining:
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

    objective: MultirateObjective

    def __init__(self, recipe: MultirateRecipe, context: TrainContext, accelerator: Accelerator) -> None:
        super().__init__(context)
        self.recipe = recipe
        self.accelerator = accelerator
        self.objective = MultirateObjective(accelerator, recipe.loss, context.draft_head(recipe.plan.vocabulary))
        self.depth = accelerator.config.exit_layer

    def finish(self) -> TrainedAdapter:
        """Return the trained weights with the recipe's plan."""
        return TrainedAdapter(self.recipe.plan, self.accelerator.config, self.accelerator.tensors())
