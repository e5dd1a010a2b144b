"""Training the shared mode of speculative streams: another model, and the streams that draft for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch

from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.checkpoint.files import read_json, staged
from vivace.checkpoint.save import copy_text_files, forget_shards, write_decoder
from vivace.engine import Engine, load
from vivace.evaluate.contest import Run
from vivace.multistream.config import MultistreamConfig, StreamPlan
from vivace.multistream.shared import SharedLoss, SharedObjective, SharedStreams
from vivace.prompts import Prompt
from vivace.train.config import TrainConfig
from vivace.train.loop import fit
from vivace.train.report import Report
from vivace.training.frozen import FrozenRecipe, Ground
from vivace.training.multistream import StreamTraining


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

    def begin(self, ground: Ground) -> SharedTraining:
        """Terms and streams that have learnt nothing."""
        return SharedTraining(self, SharedStreams(self.adapter, ground.engine.model.config, self.rank), ground)


class SharedTraining(StreamTraining):
    """Fills ``Trainee``; what comes of it is a checkpoint with streams beside it (``save``)."""

    def __init__(self, recipe: SharedRecipe, streams: SharedStreams, ground: Ground) -> None:
        super().__init__(recipe.plan, SharedObjective(streams, recipe.loss), ground)
        self.depth = ground.engine.model.config.num_layers + self.depth
        self.shared = streams

    def save(self, base: Path, out: Path) -> str:
        """The merged model with the base's tokenizer, and its streams; returns what is said of their weights.

        Call it once: it merges, and reads the pruner's threshold off the model that came of it.
        """
        model = self.ground.engine.model
        self.shared.merge(model)
        outcome = self.finish()
        with staged(out) as folder:
            write_decoder(model, folder, read_json(base / "config.json"))
            copy_text_files(base, folder)
        forget_shards(out)
        tensors = {name: value.to(model.dtype) for name, value in outcome.tensors.items()}
        streams = out / "adapters" / "multistream"
        save_adapter(streams, "multistream", base_hash(out), asdict(outcome.plan), asdict(outcome.config), tensors)
        return f"{sum(t.numel() for t in tensors.values()):,} weights of streams{outcome.note}"


def train_shared(
    recipe: SharedRecipe, engine: Engine, prompts: Sequence[Prompt], out: Path, report: Report
) -> list[Run]:
    """Train, save and time a model with its streams; arguments and errors as ``run.train_adapter``.

    Returns:
        Plain decoding of the new model, and its streams, on held-back prompts.
    """
    ground = Ground.of(recipe, engine, prompts, out, report)
    for parameter in engine.model.parameters():
        parameter.data = parameter.data.clone()  # what was loaded is a view of the base's file, and merging writes
    torch.manual_seed(recipe.seed)
    trainee = recipe.begin(ground)
    ground.require_memory(trainee)
    course = TrainConfig(recipe.loop, recipe.optimiser, recipe.seed, ground.plan_text(base_hash(engine.folder)))
    fit(engine.model, trainee.objective, ground.lessons(), course, folder=out / "run", report=report)
    report.note(f"saved the model and {trainee.save(engine.folder, out)} to {out}")
    ready = load(out, device=str(engine.model.device), dtype=str(engine.model.dtype).removeprefix("torch."))
    return ground.timed(ready, "multistream")
