"""Training the shared mode of speculative streams: another model, and the streams that draft for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vivace.checkpoint.adapters import base_hash
from vivace.checkpoint.files import read_json
from vivace.checkpoint.save import write_checkpoint
from vivace.engine import load
from vivace.methods.multistream.config import MultistreamConfig, StreamPlan
from vivace.methods.multistream.shared import SharedLoss, SharedObjective, SharedStreams
from vivace.recipes.frozen import FrozenRecipe, Saved, TrainContext
from vivace.recipes.multistream import StreamTraining
from vivace.recipes.regenerate import placed


@dataclass(frozen=True, kw_only=True)
class SharedRecipe(FrozenRecipe):
    """How to train a model and its streams together, by low-rank terms on the model."""

    kind: Literal["shared"] = "shared"
    adapter: MultistreamConfig = field(default_factory=lambda: MultistreamConfig(rank=0, bottleneck=0))
    rank: int = 32
    """Of the terms on every projection of the model."""
    loss: SharedLoss = field(default_factory=SharedLoss)
    plan: StreamPlan = field(default_factory=StreamPlan)
    """Shape of the draft, saved with the streams."""
    tokens_per_batch: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        self.plan.check_fits(self.adapter)

    def begin(self, context: TrainContext) -> SharedTraining:
        """Deltas and streams that have learnt nothing, on weights that may be written."""
        for parameter in context.engine.model.parameters():
            parameter.data = parameter.data.clone()  # what was loaded is a view of the base's file, and merging writes
        return SharedTraining(self, SharedStreams(self.adapter, context.engine.model.config, self.rank), context)


class SharedTraining(StreamTraining):
    """A model and its streams in training; what comes of it is a checkpoint with streams beside it."""

    def __init__(self, recipe: SharedRecipe, streams: SharedStreams, context: TrainContext) -> None:
        super().__init__(recipe.plan, SharedObjective(streams, recipe.loss), context)
        self.depth = context.engine.model.config.num_layers + self.depth
        self.shared = streams

    def save(self, out: Path, base: str) -> Saved:
        """Write the merged model with the base's tokenizer, and its streams.

        Call it once: it merges, and reads the pruner's threshold off the model that came of it.
        """
        engine = self.context.engine
        self.shared.merge(engine.model)
        trained = self.finish()
        write_checkpoint(engine.model, read_json(engine.folder / "config.json"), engine.folder, out)
        what = trained.write(out / "adapters" / "multistream", "multistream", base_hash(out), engine)
        what = f"the model and {what} of streams{trained.note}"
        return Saved(what, "multistream", lambda: load(out, **placed(engine)))
