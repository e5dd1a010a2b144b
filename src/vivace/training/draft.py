"""Training a small decoder that drafts for a frozen one: same tokenizer, taught by the model it will draft for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from vivace.baselines.objectives import RivalLoss, StudentObjective
from vivace.checkpoint.adapters import base_hash
from vivace.checkpoint.files import read_json, staged
from vivace.checkpoint.save import copy_text_files, forget_shards, write_decoder
from vivace.core.model import Decoder
from vivace.decode.draft_model import DraftModelConfig
from vivace.engine import Engine, load
from vivace.evaluate.contest import Run
from vivace.prompts import Prompt
from vivace.train.config import TrainConfig
from vivace.train.loop import fit
from vivace.train.report import Report
from vivace.train.scratch import ShapeConfig, start_decoder
from vivace.training.frozen import FrozenRecipe, Ground, Outcome


@dataclass(frozen=True, kw_only=True)
class DraftRecipe(FrozenRecipe):
    """How to train a draft model."""

    kind: Literal["draft"] = "draft"
    shape: ShapeConfig
    """Its vocabulary is the base's, whatever this says."""
    loss: RivalLoss = field(default_factory=RivalLoss)
    tokens_per_batch: int = 2048

    def begin(self, ground: Ground) -> StudentTraining:
        """A decoder that knows nothing yet."""
        base, tokenizer = ground.engine.model.config, ground.engine.tokenizer
        shape = replace(self.shape, vocab_size=base.vocab_size, max_positions=base.max_positions)
        spelled = tokenizer.pieces()
        pieces = [spelled.get(index, "") for index in range(base.vocab_size)]
        student = start_decoder(shape, shape.num_layers, pieces, self.seed).to(ground.engine.model.dtype)
        return StudentTraining(shape, student, self.loss)


class StudentTraining:
    """Fills ``Trainee``; what comes of it is a checkpoint of its own (``save``) and no adapter."""

    def __init__(self, shape: ShapeConfig, student: Decoder, loss: RivalLoss) -> None:
        self.shape = shape
        self.student = student
        self.objective = StudentObjective(student, loss)
        self.depth = shape.num_layers

    def finish(self) -> Outcome:
        """The weights; how far it drafts is said when it is used."""
        return Outcome(DraftModelConfig(), self.shape, self.student.state_dict())

    def save(self, base: Path, out: Path) -> None:
        """A checkpoint beside which the base's tokenizer lies."""
        config = self.shape.hf_config()
        known = read_json(base / "config.json")
        config |= {key: known.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        with staged(out) as folder:
            write_decoder(self.student, folder, config)
            copy_text_files(base, folder)
        forget_shards(out)


def train_draft(recipe: DraftRecipe, engine: Engine, prompts: Sequence[Prompt], out: Path, report: Report) -> list[Run]:
    """Train, save and time a draft model; arguments, returns and errors as ``run.train_adapter``."""
    ground = Ground.of(recipe, engine, prompts, out, report)
    torch.manual_seed(recipe.seed)
    trainee = recipe.begin(ground)
    ground.require_memory(trainee)
    course = TrainConfig(recipe.loop, recipe.optimiser, recipe.seed, ground.plan_text(base_hash(engine.folder)))
    fit(engine.model, trainee.objective, ground.lessons(), course, folder=out / "run", report=report)
    trainee.save(engine.folder, out)
    report.note(f"saved {sum(p.numel() for p in trainee.student.parameters()):,} weights to {out}")
    dtype = str(engine.model.dtype).removeprefix("torch.")
    ready = load(engine.folder, device=str(engine.model.device), dtype=dtype, draft_model=out)
    return ground.timed(ready, "draft")
