"""Recipe for training all weights of a decoder in stages: from scratch with its tokenizer, or from a base."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vivace.core.model import Decoder
from vivace.errors import ConfigError
from vivace.prompts import Prompt
from vivace.recipes.scratch import ShapeConfig
from vivace.train.config import LoopConfig
from vivace.train.next_token import BalancedNextToken, NextToken, SparseNextToken
from vivace.train.optim import OptimiserConfig
from vivace.train.report import Report
from vivace.train.variation import VariationConfig


@dataclass(frozen=True)
class Stage:
    """A part of the training with a budget of its own, during which the number of layers is constant."""

    loop: LoopConfig
    """Budget and schedule of the stage."""
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    depth: int | None = None
    """Number of layers; None means all of the shape's."""
    places: tuple[int, ...] = ()
    """Indices that the layers of the previous stage get among this stage's; empty where the depth is the same."""
    invent: float | None = None
    """Share of pairs with invented values; None means the recipe's."""
    shares: dict[str, float] = field(default_factory=dict)
    """Share of the rows of a task (by their "task") that is drawn in each epoch; 1 for tasks that are not named."""

    def __post_init__(self) -> None:
        if any(not 0 <= share <= 1 for share in self.shares.values()):
            raise ConfigError(f"shares are between 0 and 1, found {self.shares}")
        if self.depth is not None and self.depth < 1:
            raise ConfigError(f"stages.depth must be at least 1, found {self.depth}")
        if self.invent is not None and not 0 <= self.invent <= 1:
            raise ConfigError(f"stages.invent is a share between 0 and 1, found {self.invent}")


@dataclass(frozen=True)
class WholeRecipe(ABC):
    """How to train all weights of a decoder: a ``DecoderRecipe``, or a recipe that contains one as ``decoder``."""

    @abstractmethod
    def decoder_recipe(self) -> DecoderRecipe:
        """Return the data, stages and learning rates of the training."""

    @abstractmethod
    def objective(self, model: Decoder) -> NextToken:
        """Make the objective for a decoder.

        Raises:
            ConfigError: the recipe does not fit the decoder.
        """

    def _require_no_terms(self, kind: str) -> None:
        """Refuse terms of the loss that only a ``DecoderRecipe`` itself adds."""
        decoder = self.decoder_recipe()
        for name in ("balance", "sparsity"):
            if getattr(decoder, name):
                raise ConfigError(f"decoder.{name} is for kind: decoder alone; leave it out for {kind}")

    def finish(  # noqa: B027 - most recipes leave nothing but the checkpoint
        self, objective: NextToken, out: Path, prompts: Sequence[Prompt], report: Report
    ) -> None:
        """Write whatever belongs beside the finished checkpoint, such as an adapter.

        Args:
            objective: the objective of the last stage after its training.
            out: folder of the checkpoint.
            prompts: all rows of the training data.
            report: receives progress.
        """


@dataclass(frozen=True)
class DecoderRecipe(WholeRecipe):
    """How to train all weights of a decoder for next-token prediction."""

    kind: Literal["decoder"]
    stages: tuple[Stage, ...]
    shape: ShapeConfig | None = None
    """Shape of a decoder that is trained from scratch; None trains a base instead."""
    variation: VariationConfig = field(default_factory=VariationConfig)
    exercises: float = 0.0
    """Number of copying exercises per real pair, in the first epoch of the first stage."""
    tokens_per_batch: int = 4096
    longest: int = 256
    """Largest number of tokens in a row; longer rows are left out."""
    held_back: int = 512
    """Number of held-back rows, on which the best weights are selected."""
    recompute: bool = False
    """Whether to keep only the input of each layer for the backward pass: less memory, a third more time."""
    balance: float = 0.0
    """Weight of the load-balancing term of a mixture of experts (``BalancedNextToken``)."""
    sparsity: float = 0.0
    """Weight of the term that makes activations of a ReLU model sparse (``SparseNextToken``)."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("a decoder recipe needs at least one stage")
        if min(self.held_back, self.longest - 7, self.tokens_per_batch - 7) < 1:
            raise ConfigError(
                f"held_back must be >= 1, longest >= 8 and tokens_per_batch >= 8, found {self.held_back}, "
                f"{self.longest} and {self.tokens_per_batch}"
            )
        if not 0 <= self.exercises < math.inf:
            raise ConfigError(f"exercises must be finite and at least 0, found {self.exercises}")
        if not 0 <= self.balance < math.inf or (self.balance and (self.shape is not None or self.recompute)):
            raise ConfigError(
                "balance is for mixtures that are fine-tuned without recompute, at least 0 and finite, found "
                f"{self.balance}"
            )
        if not 0 <= self.sparsity < math.inf or (self.sparsity and (self.recompute or self.balance)):
            raise ConfigError(
                "sparsity is at least 0 and finite, and goes without recompute and without balance, found "
                f"{self.sparsity}"
            )
        if self.shape is None:
            if any(stage.depth is not None or stage.places for stage in self.stages):
                raise ConfigError(
                    "a base keeps its depth; leave out stages.depth and stages.places, or give a shape to start from"
                )
            return
        if self.longest > self.shape.max_positions:
            raise ConfigError(f"longest {self.longest} exceeds the {self.shape.max_positions} positions of the shape")
        depths = [self.shape.num_layers if stage.depth is None else stage.depth for stage in self.stages]
        if depths != sorted(depths) or depths[-1] != self.shape.num_layers:
            raise ConfigError(f"depths must grow to {self.shape.num_layers} layers, found {depths}")
        before = [depths[0], *depths[:-1]]
        for number, (stage, count, depth) in enumerate(zip(self.stages, before, depths, strict=True), 1):
            _check_places(number, stage.places, count, depth)

    def decoder_recipe(self) -> DecoderRecipe:
        """Return this recipe itself."""
        return self

    def objective(self, model: Decoder) -> NextToken:
        """Make the objective: next-token cross-entropy with the term that the recipe adds, if any.

        Raises:
            ConfigError: the term is for another kind of model.
        """
        if self.sparsity:
            if model.config.activation != "relu" or model.config.moe is not None:
                raise ConfigError(
                    f"the recipe's sparsity is for models with relu, this one has {model.config.activation}"
                )
            return SparseNextToken(model, weight=self.sparsity)
        if not self.balance:
            return NextToken(model, recompute=self.recompute)
        if model.config.moe is None:
            raise ConfigError(
                "the recipe balances experts and the model has none; make them first with `vivace upcycle`"
            )
        return BalancedNextToken(model, weight=self.balance)


def _check_places(number: int, places: Sequence[int], before: int, depth: int) -> None:
    """Refuse places that cannot be those of ``before`` layers among ``depth``, and missing ones of a deeper stage."""
    if not places and before == depth:
        return
    if len(places) != before or sorted(set(places)) != list(places) or places[0] < 0 or places[-1] >= depth:
        raise ConfigError(
            f"stage {number} has {depth} layers after {before}; its stages.places must be {before} rising indices "
            f"below {depth}, found {list(places)}"
        )
