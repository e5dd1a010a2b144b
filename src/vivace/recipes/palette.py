"""Recipe that trains a palettized model to stay the model that is stored: ``vivace train palette``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from vivace.checkpoint.load import load_decoder
from vivace.engine import load
from vivace.errors import ConfigError
from vivace.kernels.coded import Coded, PaletteCodes
from vivace.kernels.palette import BITS
from vivace.kernels.reference import any_order
from vivace.palette.compress import CompressConfig, check_shapes, rounded_layers, source_of, write_folder
from vivace.palette.statistics import Statistics, distance, matrices
from vivace.palette.texts import Texts
from vivace.palette.training import PaletteObjective, with_clusters
from vivace.recipes.frozen import FrozenRecipe, SavedTraining, Trainable, TrainContext, TrainedAdapter
from vivace.train.config import LoopConfig
from vivace.train.distillation import DistillationLoss
from vivace.train.optim import OptimiserConfig


@dataclass(frozen=True, kw_only=True)
class PaletteRecipe(FrozenRecipe):
    """How to train palettes."""

    kind: Literal["palette"] = "palette"
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(steps=300, warmup_steps=10))
    optimiser: OptimiserConfig = field(default_factory=lambda: OptimiserConfig(adamw_rate=0.02))
    """Rates are shares of the mean distance of neighbouring entries."""
    bits: int = 3
    """Bits of a code in every matrix of the layers."""
    has_scales: bool = True
    """Whether entries are integers with scales, or bfloat16."""
    rounds_ends: bool = True
    """Whether embedding and head take eight bits in the folder."""
    rounds: int = 1
    """Updates of the centroids in each step."""
    share: float = 0.1
    """Temperature at first, as a share of the mean squared distance of neighbouring centroids."""
    last_share: float = 0.01
    """Temperature after ``cooling_steps``."""
    cooling_steps: int = 200
    """Steps during which the temperature falls."""
    calibration_tokens: int = 16384
    """Tokens of text for GPTQ, whose codes training begins with."""
    loss: DistillationLoss = field(default_factory=DistillationLoss)
    tokens_per_batch: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in BITS:
            raise ConfigError(f"bits are 2, 3 or 4, found {self.bits}")
        if not 0 < self.last_share <= self.share:
            raise ConfigError(f"shares fall and stay above 0, found {self.share:g} and {self.last_share:g}")
        if self.rounds < 1 or self.cooling_steps < 0 or self.calibration_tokens < 1:
            raise ConfigError("rounds and calibration_tokens are at least 1, cooling_steps at least 0")

    def begin(self, context: TrainContext) -> PaletteTraining:
        """Round the model by GPTQ and return what trains from there."""
        return PaletteTraining(self, context)


class PaletteTraining(Trainable):
    """Trains clustered matrices; the result is a folder of palettes."""

    def __init__(self, recipe: PaletteRecipe, context: TrainContext) -> None:
        super().__init__(context)
        self.recipe = recipe
        engine, note = context.engine, context.report.note
        self.texts = _texts(recipe, context)
        self.settings = CompressConfig(
            recipe.bits, method="gptq", has_scales=recipe.has_scales, rounds_ends=recipe.rounds_ends
        )
        self.source = source_of(engine.folder)
        student = load_decoder(engine.folder, dtype="float32")
        note(f"rounding by gptq on {sum(batch.num_elements for batch in self.texts.calibration):,} tokens")
        check_shapes(self.source.table, matrices(student))
        stored: dict[str, Tensor] = {}
        for name, part in matrices(student).items():
            stored[name] = part.weight.detach().clone()
            part.weight = torch.nn.Parameter(stored[name].clone(), requires_grad=False)
        bits, first = dict.fromkeys(stored, recipe.bits), dict[str, Coded]()
        with torch.no_grad(), any_order():
            for layer in rounded_layers(student, bits, self.settings, self.texts, Statistics()):
                first |= layer
            self.begun = distance(student, engine.model, self.texts.held_back)
        note(f"gptq: {self.begun.kl:.4f} nats a token from the stored model on rows held back")
        self.first = {name: codes for name, codes in first.items() if isinstance(codes, PaletteCodes)}
        self.parts = with_clusters(student, stored, self.first, recipe.rounds)
        self.student = student
        self.objective = PaletteObjective(
            student, self.parts, recipe.loss, (recipe.share, recipe.last_share), recipe.cooling_steps
        )
        self.depth = student.config.num_layers

    def finish(self) -> TrainedAdapter:
        """Not called: what is trained is a model, and ``save`` writes it."""
        raise AssertionError("palettes are no adapter")

    def save(self, out: Path, base: str) -> SavedTraining:
        """Write the folder; where training did not come nearer to the stored model than gptq, gptq's codes."""
        engine = self.context.engine
        for part in self.parts.values():
            part.settle()
        with torch.no_grad(), any_order():
            trained = distance(self.student, engine.model, self.texts.held_back)
        is_nearer = trained.kl < self.begun.kl
        coded: dict[str, Coded] = {
            name: part.codes() if is_nearer else self.first[name] for name, part in self.parts.items()
        }
        written = write_folder(self.source, out, coded, self.settings)
        kept = "" if is_nearer else "; training came no nearer, so the codes are gptq's"
        note = (
            f": {trained.kl:.4f} nats a token from the stored model on rows held back, gptq {self.begun.kl:.4f}{kept}"
        )
        what = f"{written.all_bits:.2f} bits a weight ({written.matrix_bits:.2f} in the layers)"
        return SavedTraining(what, "plain", lambda: load(out), note)


def _texts(recipe: PaletteRecipe, context: TrainContext) -> Texts:
    """Return batches that GPTQ rounds for, of short rows and long ones, and those that are held back."""
    every = context.batches(context.train)
    needed = max(1, recipe.calibration_tokens // recipe.tokens_per_batch)
    return Texts(every[:: max(1, len(every) // needed)][:needed], context.batches(context.held_back))
