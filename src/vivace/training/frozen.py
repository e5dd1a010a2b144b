"""What every training on a frozen base has: its recipe, the rows it learns from, what it gives."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from vivace.engine import Engine
from vivace.errors import ConfigError, UnsupportedError
from vivace.evaluate.contest import Question, Run, hold, summarise
from vivace.evaluate.entrants import Entrant
from vivace.prompts import Prompt
from vivace.train.batches import DataSplit
from vivace.train.config import LoopConfig
from vivace.train.data import Batches, DecoderObjective, Rows, TokenBatch, collate, grouped, pairs_of, texts_of
from vivace.train.memory import estimate_memory, require_memory
from vivace.train.optim import Optimiser, OptimiserConfig
from vivace.train.report import Report
from vivace.train.variation import Pair
from vivace.training.regenerate import as_it_decodes, regenerated

NUM_MEASURED = 24
"""Held-back prompts that what was trained is timed on."""


@dataclass(frozen=True, kw_only=True)
class FrozenRecipe(ABC):
    """How to train something beside a frozen base."""

    kind: str
    loop: LoopConfig
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    tokens_per_batch: int = 4096
    longest: int = 512
    """Rows with more tokens are left out."""
    held_back: int = 256
    """Rows that choose the best weights and time the result."""
    regenerate: int = 0
    """Prompts whose answers the base writes anew first: it will draft for what it says itself."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.held_back < 1 or self.regenerate < 0 or self.longest < 8:
            raise ConfigError(
                f"held_back must be >= 1, regenerate >= 0 and longest >= 8, found {self.held_back}, "
                f"{self.regenerate} and {self.longest}"
            )

    @property
    def num_aside(self) -> int:
        """Rows that the loop does not see, for a lesson after it."""
        return 0

    @abstractmethod
    def begin(self, ground: Ground) -> Trainee:
        """What is trained, untrained."""


class Trainee(Protocol):
    """A technique in training."""

    @property
    def objective(self) -> DecoderObjective:
        """What the loop lowers."""
        ...

    @property
    def depth(self) -> int:
        """Layers of the base that gradients pass through, or as many as cost as much memory."""
        ...

    def finish(self) -> Outcome:
        """After the loop, with the best weights in place."""
        ...


@dataclass(frozen=True)
class Outcome:
    """What an adapter's folder gets."""

    plan: Any
    """A dataclass: how to decode with it."""
    config: Any
    """A dataclass: what the weights are for."""
    tensors: Mapping[str, Tensor]
    note: str = ""
    """More than how many weights there are."""


@dataclass(frozen=True)
class Ground:
    """What a training stands on: the frozen base and the rows."""

    recipe: FrozenRecipe
    engine: Engine
    held_back: Sequence[Pair]
    learnt: Sequence[Pair]
    aside: Sequence[Pair]
    """Seen by nobody but whoever asked for them (``FrozenRecipe.num_aside``)."""
    report: Report

    @staticmethod
    def of(recipe: FrozenRecipe, engine: Engine, prompts: Sequence[Prompt], out: Path, report: Report) -> Ground:
        """Rows shuffled and shared out.

        Raises:
            ConfigError: too few rows, or ``out`` is the base's own folder.
            UnsupportedError: the base's weights are packed.
        """
        if out.resolve() == engine.folder.resolve():
            raise ConfigError(f"{out} is the model itself; its adapter belongs into {out / 'adapters' / recipe.kind}")
        if engine.kernels.body is not None:
            raise UnsupportedError("packed weights cannot be trained on; load the model with kernels='torch'")
        pairs = _pairs(recipe, engine, prompts, out, report)
        random.Random(recipe.seed).shuffle(pairs)
        first = recipe.held_back + recipe.num_aside
        if len(pairs) <= first:
            kept = f"held_back {recipe.held_back}" + (f" and {recipe.num_aside} aside" if recipe.num_aside else "")
            raise ConfigError(f"{len(pairs)} rows leave nothing to train on with {kept}; lower them")
        return Ground(recipe, engine, pairs[: recipe.held_back], pairs[first:], pairs[recipe.held_back : first], report)

    def timed(self, ready: Engine, method: str) -> list[Run]:
        """Plain decoding beside a method on held-back prompts, by the decoding code and kernels of ``ready``."""
        asked = [prompt for prompt, _ in self.held_back[:NUM_MEASURED]]
        questions = [Question(prompt, tuple(self.engine.tokenizer.encode_prompt(prompt))) for prompt in asked]
        entrants = [Entrant(name, ready, max_new_tokens=64) for name in ("plain", method)]
        return summarise(hold(entrants, questions, repeats=1), "plain")

    def batches(self, pairs: Sequence[Pair]) -> list[TokenBatch]:
        """Some rows, once, in order of length."""
        rows = Rows(self.engine.tokenizer, self.recipe.longest).encode(pairs)
        return [collate(group) for group in grouped(rows, self.recipe.tokens_per_batch)]

    def lessons(self) -> DataSplit[TokenBatch]:
        """Endless batches of what is learnt from, and those held back."""
        rows, recipe = Rows(self.engine.tokenizer, self.recipe.longest), self.recipe
        return DataSplit(
            Batches(lambda rng, number: self.learnt, rows, tokens_per_batch=recipe.tokens_per_batch, seed=recipe.seed),
            self.batches(self.held_back),
        )

    def plan_text(self, base: str) -> str:
        """What a resumed run must repeat."""
        rows = len(self.held_back) + len(self.learnt) + len(self.aside)
        return json.dumps({"recipe": asdict(self.recipe), "base": base, "rows": rows}, sort_keys=True)

    def require_memory(self, trainee: Trainee) -> None:
        """Say what is needed; refuse what would not fit.

        Raises:
            CapacityError: not enough memory.
        """
        model = self.engine.model
        optimiser = Optimiser(trainee.objective.groups(), self.recipe.optimiser)
        weights = [*model.parameters(), *optimiser.params]
        part = replace(model.config, num_layers=trainee.depth)
        need = estimate_memory(part, weights, optimiser.params, optimiser.num_bytes(), self.recipe.tokens_per_batch)
        if self.engine.storage is not None:  # what streams through is no parameter
            plan = self.engine.storage.plan
            need = replace(need, weights=need.weights + plan.buffer_bytes + plan.pool_bytes)
        self.report.note(f"memory: {need}")
        require_memory(need, model.device)


def _pairs(recipe: FrozenRecipe, engine: Engine, prompts: Sequence[Prompt], out: Path, report: Report) -> list[Pair]:
    if not recipe.regenerate:
        return pairs_of(prompts)
    texts = sorted(set(texts_of(prompts)))
    random.Random(recipe.seed).shuffle(texts)
    path = out / "run" / "regenerated.jsonl"
    return regenerated(as_it_decodes(engine), texts[: recipe.regenerate], path, report.note)
