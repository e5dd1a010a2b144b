"""Recipe for the shared mode of speculative streams: a fine-tuned model together with streams that draft for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vivace.checkpoint.adapters import base_hash
from vivace.checkpoint.draft_vocabulary import save_vocabulary
from vivace.checkpoint.load import read_config
from vivace.checkpoint.save import write_checkpoint
from vivace.engine import load
from vivace.methods.multistream.config import MultistreamConfig, StreamPlan
from vivace.methods.multistream.shared import SharedLoss, SharedObjective, SharedStreams
from vivace.recipes.frozen import FrozenRecipe, SavedTraining, TrainContext
from vivace.recipes.multistream import StreamTraining
from vivace.recipes.regenerate import placed


@dataclass(frozen=True, kw_only=True)
class SharedRecipe(FrozenRecipe):
    """How to train a model and its streams together, the model by low-rank deltas on its projections."""

    kind: Literal["shared"] = "shared"
    adapter: MultistreamConfig = field(default_factory=lambda: MultistreamConfig(rank=0, bottleneck=0))
    rank: int = 32
    """Rank of the deltas on every projection of the model."""
    loss: SharedLoss = field(default_factory=SharedLoss)
    plan: StreamPlan = field(default_factory=StreamPlan)
    """Shape of the draft that decoding makes, saved with the streams."""
    tokens_per_batch: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        self.plan.check_fits(self.adapter)

    def begin(self, context: TrainContext) -> SharedTraining:
        """Make untrained deltas and streams, and copy the model's weights so that they can be changed."""
        for parameter in context.engine.model.parameters():
            parameter.data = parameter.data.clone()  # a loaded weight is a view of the file; merging writes
        model = context.engine.model
        return SharedTraining(self, SharedStreams(self.adapter, model.config, self.rank).to(model.device), context)


class SharedTraining(StreamTraining):
    """Trains a model and its streams; the result is a checkpoint with streams beside it."""

    def __init__(self, recipe: SharedRecipe, streams: SharedStreams, context: TrainContext) -> None:
        head = context.draft_head(recipe.plan.vocabulary)
        super().__init__(recipe.plan, SharedObjective(streams, recipe.loss, head, attach=recipe.plan.attach), context)
        self.depth = context.engine.model.config.num_layers
        self.shared = streams

    def save(self, out: Path, base: str) -> SavedTraining:
        """Write the merged model with the base's tokenizer, and its streams.

        This may be called only once, since it merges the deltas into the model; the pruner's threshold is calibrated on
        the merged model.
        """
        engine = self.context.engine
        self.shared.merge(engine.model)
        trained = self.finish()
        write_checkpoint(engine.model, read_config(engine.folder, engine.ignored_config_keys), engine.folder, out)
        folder = out / "adapters" / "multistream"
        what = trained.write(folder, "multistream", base_hash(out), engine)
        if self.plan.vocabulary:
            save_vocabulary(folder, self.context.frequent())
        what = f"the model and {what} of streams{trained.note}"
        return SavedTraining(what, "multistream", lambda: load(out, **placed(engine)))
