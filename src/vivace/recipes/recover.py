"""Recipe for the LoRA that wins back what a checkpoint has lost to few bits: ``vivace train recover``.

The checkpoint stays as it is and is decoded once for training. The LoRA learns to give its rows the distribution of the
stored model (*Apple Intelligence Foundation Language Models*, 2024, arXiv:2407.21075, accuracy-recovery adapters). It
is written as PEFT writes one, with the hash of the checkpoint, and worn by default where it lies in
``<model>/adapters/recovery``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from vivace.adapters.lora import table_of
from vivace.adapters.training import LoraObjective, LoraWeights
from vivace.checkpoint.files import RECOVERY, named_file
from vivace.checkpoint.peft import save_lora
from vivace.core.model import Decoder
from vivace.errors import ConfigError
from vivace.kernels.reference import any_order
from vivace.palette.statistics import distance
from vivace.recipes.frozen import SavedTraining, TrainContext
from vivace.recipes.lora import LoraRecipe, LoraTraining
from vivace.recipes.stored import stored_model
from vivace.train.distillation import DistillationLoss
from vivace.train.recovery import RecoveryObjective


@dataclass(frozen=True, kw_only=True)
class RecoverRecipe(LoraRecipe):
    """How to train the LoRA of a checkpoint in few bits."""

    kind: Literal["recover"] = "recover"  # type: ignore[assignment]
    stored: str = ""
    """Folder or Hub id of the model that the checkpoint was made of."""
    loss: DistillationLoss = field(default_factory=DistillationLoss)

    @property
    def folder(self) -> str:
        """Name of the folder beside the model, where it is worn by default."""
        return RECOVERY

    @property
    def beside(self) -> tuple[str, ...]:
        """The stored model, whose distribution is learnt."""
        return (self.stored,) if self.stored else ()

    def begin(self, context: TrainContext) -> RecoverTraining:
        """Make factors that add nothing yet, or those of the LoRA to begin with, and read the stored model.

        Raises:
            ConfigError: the stored model is not named.
            MismatchError: it is of another shape than the checkpoint.
        """
        if not self.stored:
            raise ConfigError("say what the checkpoint was made of, whose distribution is learnt: stored=MODEL")
        stored = stored_model(self.stored, context.engine)
        return RecoverTraining(context, super().begin(context).weights, stored)


class RecoverTraining(LoraTraining):
    """Trains the factors; the result is a folder as PEFT writes it, in bfloat16."""

    def __init__(self, context: TrainContext, weights: LoraWeights, stored: Decoder) -> None:
        super().__init__(context, weights)
        recipe = context.recipe
        assert isinstance(recipe, RecoverRecipe)
        self.stored = stored
        self.objective = RecoveryObjective(LoraObjective(context.engine.model, weights), stored, recipe.loss)

    def save(self, out: Path, base: str) -> SavedTraining:
        """Write the LoRA, and say how far the checkpoint is from the stored model with it and without."""
        engine, held_back = self.context.engine, self.context.batches(self.context.held_back)
        save_lora(
            out,
            self.weights.factors(),
            table_of(engine.folder, engine.model),
            scale=self.weights.scale,
            base=base,
            base_name=named_file(engine.folder),
            dtype=torch.bfloat16,
        )
        with torch.no_grad(), any_order():
            before = distance(engine.model, self.stored, held_back)
            after = distance(engine.model, self.stored, held_back, (self.weights.deltas,))
        count = sum(p.numel() for p in self.weights.parameters())
        bits = 16 * count / sum(part.numel() for part in self.stored.parameters())
        where = "" if out.parent.name == "adapters" and out.name == RECOVERY else "; in adapters/recovery it is worn"
        note = (
            f" ({bits:.2f} bits a weight of the model): {after.kl:.4f} nats a token from the stored model on rows held "
            f"back, {before.kl:.4f} without; loss {after.loss:.4f}, {before.loss:.4f} without, stored "
            f"{after.stored_loss:.4f}{where}"
        )
        return SavedTraining(f"{count:,} weights of a LoRA", None, None, note)
