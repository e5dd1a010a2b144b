"""Recipe that trains a palettized model to stay the model that is stored: ``vivace train palette``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from vivace.checkpoint.files import resolve
from vivace.checkpoint.load import coded_of, load_decoder, open_checkpoint
from vivace.core.layers import Linear
from vivace.core.model import Decoder
from vivace.engine import load
from vivace.errors import ConfigError, MismatchError, UnsupportedError
from vivace.kernels.coded import Coded, PaletteCodes
from vivace.kernels.library import LANES
from vivace.kernels.palette import BITS
from vivace.kernels.reference import any_order
from vivace.palette.compress import (
    CompressConfig,
    check_finite,
    check_out,
    check_shapes,
    rounded_layers,
    write_folder,
)
from vivace.palette.statistics import Statistics, distance, matrices
from vivace.palette.texts import Texts
from vivace.palette.training import ClusteringObjective, PaletteObjective, PalettePart, with_clusters, with_entries
from vivace.recipes.frozen import FrozenRecipe, SavedTraining, Trainable, TrainContext, TrainedAdapter
from vivace.train.config import LoopConfig
from vivace.train.data import sample_of
from vivace.train.distillation import DistillationLoss
from vivace.train.optim import OptimiserConfig

DEFAULT_BITS = 3
"""Bits of a code where neither recipe nor folder says how many."""


@dataclass(frozen=True, kw_only=True)
class PaletteRecipe(FrozenRecipe):
    """How to train palettes."""

    kind: Literal["palette"] = "palette"
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(steps=100, warmup_steps=5))
    optimiser: OptimiserConfig = field(default_factory=lambda: OptimiserConfig(adamw_rate=0.008))
    """Rates are shares of the mean distance of neighbouring entries."""
    bits: int | None = None
    """Bits of a code in every matrix of the layers; those that ``init`` has where None, or 3."""
    trains: Literal["codes", "entries"] = "entries"
    """What is trained: what the codes stand for, scales where there are any and entries elsewhere, which is little and
    learns from little text; or the weights, and with them codes and entries, by clustering (eDKM)."""
    has_scales: bool | None = None
    """Whether entries are integers with scales, or bfloat16; as in ``init`` where None, or integers."""
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
    init: str = ""
    """Folder of palettes of this model whose codes, entries and scales training begins with instead, as ``vivace
    compress`` writes it; a run that is resumed then rounds nothing again. Matrices that have eight bits there keep
    them."""
    loss: DistillationLoss = field(default_factory=DistillationLoss)
    tokens_per_batch: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits is not None and self.bits not in BITS:
            raise ConfigError(f"bits are 2, 3 or 4, found {self.bits}")
        if not 0 < self.last_share <= self.share:
            raise ConfigError(f"shares fall and stay above 0, found {self.share:g} and {self.last_share:g}")
        if self.trains not in ("codes", "entries"):
            raise ConfigError(f"trains is codes or entries, found {self.trains!r}")
        if self.rounds < 1 or self.cooling_steps < 0 or self.calibration_tokens < 1:
            raise ConfigError("rounds and calibration_tokens are at least 1, cooling_steps at least 0")

    @property
    def beside(self) -> tuple[str, ...]:
        """The palettes that training begins with, which a snapshot says nothing of but what was trained."""
        return (self.init,) if self.init else ()

    def begin(self, context: TrainContext) -> PaletteTraining:
        """Round the model by GPTQ, or read how it was rounded, and return what trains from there.

        Raises:
            MismatchError: the folder to begin with has other matrices, or other bits or entries than the recipe asks
                for.
        """
        return PaletteTraining(self, context)


class PaletteTraining(Trainable):
    """Trains palettes; the result is a folder of them."""

    def __init__(self, recipe: PaletteRecipe, context: TrainContext) -> None:
        super().__init__(context)
        self.recipe = recipe
        check_out(context.folder.parent)
        engine, note = context.engine, context.report.note
        self.texts = _texts(recipe, context)
        self.settings = CompressConfig(
            recipe.bits or DEFAULT_BITS,
            method="gptq",
            has_scales=recipe.has_scales is not False,
            rounds_ends=recipe.rounds_ends,
        )
        self.source = open_checkpoint(engine.folder)
        student = load_decoder(engine.folder, dtype="float32")
        check_shapes(self.source.plan, matrices(student))
        if recipe.trains == "codes":
            _check_tiles(matrices(student))
        check_finite(student)
        stored: dict[str, Tensor] = {}
        for name, part in matrices(student).items():
            stored[name] = part.weight.detach().clone()
            part.weight = torch.nn.Parameter(stored[name].clone(), requires_grad=False)
        with torch.no_grad(), any_order():
            self.first = self._rounded(student) if not recipe.init else self._read(student, Path(recipe.init))
            self.begun = distance(student, engine.model, self.texts.held_back)
        self.begun_by = "gptq" if not recipe.init else recipe.init
        note(f"{self.begun_by}: {self.begun.kl:.4f} nats a token from the stored model on rows held back")
        self.parts: Mapping[str, PalettePart]
        self.objective: PaletteObjective
        palettes = {name: codes for name, codes in self.first.items() if isinstance(codes, PaletteCodes)}
        if recipe.trains == "entries":
            self.parts = with_entries(student, palettes)
            self.objective = PaletteObjective(student, self.parts, recipe.loss)
        else:
            self.parts = clustered = with_clusters(student, stored, palettes, recipe.rounds)
            shares = recipe.share, recipe.last_share
            self.objective = ClusteringObjective(student, clustered, recipe.loss, shares, recipe.cooling_steps)
        self.student = student
        self.depth = student.config.num_layers

    def _rounded(self, student: Decoder) -> dict[str, Coded]:
        """Round the matrices by GPTQ, leave them so in the student, and return their codes."""
        count = sum(batch.num_elements for batch in self.texts.calibration)
        self.context.report.note(f"rounding by gptq on {count:,} tokens")
        assert self.settings.bits is not None
        bits, found = dict.fromkeys(matrices(student), self.settings.bits), dict[str, Coded]()
        for layer in rounded_layers(student, bits, self.settings, self.texts, Statistics()):
            found |= layer
        return found

    def _read(self, student: Decoder, folder: Path) -> dict[str, Coded]:
        """Return the codes of a folder of palettes, and put its weights into the student."""
        stored = coded_of(resolve(folder), self.source.plan)
        found = {name: stored[name] for name in matrices(student) if name in stored}
        recipe = self.recipe
        for name, part in matrices(student).items():
            codes = found.get(name)
            if codes is None or codes.shape != tuple(part.weight.shape):
                raise MismatchError(f"{folder} has no palette of {name} that training could begin with")
            bits = codes.bits if isinstance(codes, PaletteCodes) else 8
            if recipe.bits not in (None, bits):
                raise MismatchError(f"{folder} has {bits} bits in {name}, and the recipe says {recipe.bits}")
            if isinstance(codes, PaletteCodes) and recipe.has_scales not in (None, codes.scales is not None):
                kind = "bfloat16" if codes.scales is None else "integers with scales"
                raise MismatchError(f"{folder} has {kind} in {name}, and the recipe says otherwise (has_scales)")
            part.weight.data = codes.dense()
        if not any(isinstance(codes, PaletteCodes) for codes in found.values()):
            raise MismatchError(f"there is no palette to train in {folder}: every matrix has eight bits")
        return found

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
            name: self.parts[name].codes() if is_nearer and name in self.parts else codes
            for name, codes in self.first.items()
        }
        written = write_folder(self.source, out, coded, self.settings)
        kept = "" if is_nearer else f"; training came no nearer, so the codes are those of {self.begun_by}"
        note = (
            f": {trained.kl:.4f} nats a token from the stored model on rows held back, {self.begun_by} "
            f"{self.begun.kl:.4f}{kept}"
        )
        what = f"{written.all_bits:.2f} bits a weight ({written.matrix_bits:.2f} in the layers)"
        return SavedTraining(what, "plain", lambda: load(out), note)


def _check_tiles(parts: Mapping[str, Linear]) -> None:
    """Refuse matrices that are not whole tiles before anything is rounded.

    Raises:
        UnsupportedError: a matrix has another number of outputs.
    """
    for name, part in parts.items():
        if len(part.weight) % LANES:
            raise UnsupportedError(
                f"{name} has {len(part.weight)} outputs, and codes are trained in tiles of {LANES}; give trains=entries"
            )


def _texts(recipe: PaletteRecipe, context: TrainContext) -> Texts:
    """Return batches that GPTQ rounds for, of short rows and long ones, and those that are held back."""
    calibration = sample_of(context.batches(context.train), recipe.calibration_tokens)
    return Texts(calibration, context.batches(context.held_back))
