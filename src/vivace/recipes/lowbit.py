"""Recipe that calibrates sums over ranks in four bits (``parallel/lowbit.py``): ``vivace train lowbit ranks=2``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch

from vivace.checkpoint.adapters import save_adapter
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.engine import load
from vivace.errors import ConfigError, UnsupportedError
from vivace.parallel.calibration import Seen
from vivace.parallel.lowbit import KIND
from vivace.parallel.shares import columns_of
from vivace.parallel.simulated import MOST_RANKS, SimulatedLoading
from vivace.recipes.frozen import FrozenRecipe, SavedTraining, Trainable, TrainContext, TrainedAdapter
from vivace.train.config import LoopConfig


@dataclass(frozen=True, kw_only=True)
class LowBitRecipe(FrozenRecipe):
    """On how much text ranges of the parts of several ranks are watched."""

    kind: Literal["lowbit"] = "lowbit"
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(steps=1, warmup_steps=0))
    """Unused: nothing is trained."""
    ranks: int = 2
    """Number of ranks that the result is for."""
    sequences: int = 256
    """Number of texts; each moves ranges by a hundredth, so that fewer leave much weight on the first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.ranks <= MOST_RANKS:
            raise ConfigError(f"ranks are 2 to {MOST_RANKS}, found {self.ranks}")
        if self.sequences < 1:
            raise ConfigError(f"sequences must be at least 1, found {self.sequences}")

    @property
    def folder(self) -> str:
        """Name of the folder beside the model, which has the number of ranks."""
        return f"{KIND}-{self.ranks}"

    def why_not(self, model: Decoder) -> str | None:
        """Return why no ranks can be calibrated for a model; None if they can."""
        if model.device.type != "cpu":
            return "ranks compute on the CPU; leave out --device"
        return "mixtures of experts are not shared among ranks" if model.config.moe is not None else None

    def begin(self, context: TrainContext) -> LowBitTraining:
        """Return what watches."""
        return LowBitTraining(self, context)


@dataclass(frozen=True)
class LowBitConfig:
    """What a calibration is of."""

    num_ranks: int
    columns: list[int]
    """Feed-forward columns of each rank."""
    dtype: str
    sequences: int
    tokens: int


class LowBitTraining(Trainable):
    """Lets texts pass through simulated ranks, and watches what these add up."""

    objective = None

    def __init__(self, recipe: LowBitRecipe, context: TrainContext) -> None:
        super().__init__(context)
        self.recipe = recipe

    def finish(self) -> TrainedAdapter:
        """Not called: statistics stay in float32, whatever the model's dtype is, so ``save`` writes them."""
        raise AssertionError("a calibration is written by save")

    @torch.inference_mode()
    def save(self, out: Path, base: str) -> SavedTraining:
        """Watch, and write ranges and steps."""
        recipe, context = self.recipe, self.context
        texts = [row.tokens for row in context.rows(context.train)[: recipe.sequences]]
        if len(texts) < recipe.sequences:
            context.report.note(f"{len(texts)} texts, fewer than {recipe.sequences}: ranges lean on the first ones")
        seen, count = Seen(recipe.ranks), sum(map(len, texts))
        kind = str(context.engine.model.dtype).removeprefix("torch.")
        try:
            engine = load(
                context.engine.folder,
                dtype=kind,
                kernels="torch",
                ignore_config_keys=context.engine.ignored_config_keys,
                parallel=SimulatedLoading(recipe.ranks, seen.wire),
            )
        except UnsupportedError as error:
            raise ConfigError(str(error)) from error
        model = engine.model
        for number, text in enumerate(texts, 1):
            step = Step.dense(1, len(text), device=model.device)
            model.run(model.embed(torch.tensor(text), step), step, 0, model.config.num_layers)
            if number % 64 == 0 or number == len(texts):
                context.report.note(f"{number} of {len(texts)} texts")
        assert engine.world is not None
        engine.world.close()
        columns = columns_of(context.engine.model.config, recipe.ranks)
        config = LowBitConfig(recipe.ranks, columns, kind, len(texts), count)
        save_adapter(out, KIND, base, {}, asdict(config), seen.calibration(model.config, kind).tensors())
        return SavedTraining(f"ranges of {recipe.ranks} ranks on {count:,} tokens", None, None)
