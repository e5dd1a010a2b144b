"""Recipe for a small draft model with the tokenizer of a frozen decoder, which is its teacher."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from vivace.checkpoint.files import read_json
from vivace.checkpoint.save import write_checkpoint
from vivace.core.model import Decoder
from vivace.engine import Engine, load
from vivace.methods.draft.drafter import DraftModelConfig
from vivace.methods.draft.objective import StudentObjective
from vivace.recipes.frozen import FrozenRecipe, SavedTraining, Trainable, TrainContext, TrainedAdapter
from vivace.recipes.regenerate import placed
from vivace.recipes.scratch import ShapeConfig, start_decoder
from vivace.train.distillation import DistillationLoss


@dataclass(frozen=True, kw_only=True)
class DraftRecipe(FrozenRecipe):
    """How to train a draft model."""

    kind: Literal["draft"] = "draft"
    shape: ShapeConfig
    """Shape of the draft model; its vocabulary size and longest position are the base's, whatever is given here."""
    loss: DistillationLoss = field(default_factory=DistillationLoss)
    tokens_per_batch: int = 2048

    def begin(self, context: TrainContext) -> StudentTraining:
        """Make an untrained draft model."""
        base, tokenizer = context.engine.model, context.engine.tokenizer
        shape = replace(self.shape, vocab_size=base.config.vocab_size, max_positions=base.config.max_positions)
        student = start_decoder(shape, shape.num_layers, tokenizer.pieces(), self.seed)
        student = student.to(base.device, base.dtype)
        return StudentTraining(context, shape, student, self.loss)


class StudentTraining(Trainable):
    """Trains a draft model; the result is a checkpoint of its own, not an adapter."""

    def __init__(self, context: TrainContext, shape: ShapeConfig, student: Decoder, loss: DistillationLoss) -> None:
        super().__init__(context)
        self.shape = shape
        self.student = student
        self.objective = StudentObjective(student, loss)
        self.depth = shape.num_layers

    def finish(self) -> TrainedAdapter:
        """Return the weights; how many tokens to draft is chosen when decoding."""
        return TrainedAdapter(DraftModelConfig(), self.shape, self.student.state_dict())

    def save(self, out: Path, base: str) -> SavedTraining:
        """Write a checkpoint with a copy of the base's tokenizer."""
        engine, config = self.context.engine, self.shape.hf_config()
        known = read_json(engine.folder / "config.json")
        config |= {key: known.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_checkpoint(self.student, config, engine.folder, out)
        what = f"{sum(p.numel() for p in self.student.parameters()):,} weights"
        return SavedTraining(what, "draft", lambda: _with_draft(engine, out))


def _with_draft(engine: Engine, out: Path) -> Engine:
    """Open the base again, with a draft model."""
    keys = engine.ignored_config_keys
    return load(engine.folder, **placed(engine), ignore_config_keys=keys, draft_model=out)
