"""What every training beside a frozen decoder has: its recipe, the rows it learns from, and what it gives."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vivace.checkpoint.adapters import save_adapter
from vivace.engine import Engine
from vivace.errors import ConfigError, UnsupportedError
from vivace.evaluate.benchmark import BenchmarkPrompt, Run, run_benchmark, summarise
from vivace.evaluate.systems import MethodSystem
from vivace.prompts import Prompt
from vivace.recipes.regenerate import as_it_decodes, regenerated
from vivace.train.batches import DataSplit
from vivace.train.config import LoopConfig
from vivace.train.data import Batches, DecoderObjective, Rows, TokenBatch, collate, grouped, pairs_of, texts_of
from vivace.train.memory import estimate_memory, require_memory
from vivace.train.optim import Optimiser, OptimiserConfig
from vivace.train.report import Report
from vivace.train.variation import Pair

NUM_MEASURED = 24
"""Held-back prompts that what was trained is timed on."""


@dataclass(frozen=True, kw_only=True)
class FrozenRecipe(ABC):
    """How to train something beside a frozen decoder."""

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
    def num_calibration(self) -> int:
        """Count the rows that the loop does not see, for what is fitted after it."""
        return 0

    @abstractmethod
    def begin(self, context: TrainContext) -> Trainable:
        """Make what is trained, untrained; random numbers are drawn from torch's generator, which is seeded before."""


@dataclass(frozen=True)
class TrainedAdapter:
    """What the folder of an adapter gets."""

    plan: Any
    """A dataclass: how to decode with it."""
    config: Any
    """A dataclass: what the weights are for."""
    tensors: Mapping[str, Tensor]
    note: str = ""
    """What is told beside how many weights there are."""

    def write(self, folder: Path, kind: str, base: str, model: Engine) -> str:
        """Save the adapter in the decoder's precision.

        Args:
            folder: where to.
            kind: the method it is for.
            base: ``base_hash`` of the decoder it belongs to.
            model: that decoder.

        Returns:
            What was saved, in words.
        """
        tensors = {name: value.to(model.model.dtype) for name, value in self.tensors.items()}
        save_adapter(folder, kind, base, asdict(self.plan), asdict(self.config), tensors)
        count = sum(tensor.numel() for tensor in tensors.values())
        return f"{count:,} weights" if tensors else "thresholds"


@dataclass(frozen=True)
class Saved:
    """What a training left on disk."""

    what: str
    """For the report."""
    method: str
    """How to decode with it."""
    load: Callable[[], Engine]
    """Opens an engine that can."""
    note: str = ""


class Trainable(ABC):
    """A method in training."""

    objective: DecoderObjective | None
    """What the loop lowers; None where there is nothing to learn, only something to calibrate."""
    depth: int = 1
    """Layers of the base that gradients pass through, or as many as cost as much memory."""

    def __init__(self, context: TrainContext) -> None:
        self.context = context

    @abstractmethod
    def finish(self) -> TrainedAdapter:
        """Return what was trained; called once, after the loop, with the best weights in place."""

    def save(self, out: Path, base: str) -> Saved:
        """Write what was trained: an adapter of the frozen decoder, unless this says otherwise.

        Args:
            out: folder.
            base: ``base_hash`` of the frozen decoder.
        """
        engine, kind, trained = self.context.engine, self.context.recipe.kind, self.finish()
        what = trained.write(out, kind, base, engine)
        return Saved(what, kind, lambda: as_it_decodes(engine, {kind: out}), trained.note)


@dataclass(frozen=True)
class TrainContext:
    """What a training stands on: the frozen decoder and the rows."""

    recipe: FrozenRecipe
    engine: Engine
    train: Sequence[Pair]
    held_back: Sequence[Pair]
    calibration: Sequence[Pair]
    """Rows that the loop never saw, for whoever asked for them (``FrozenRecipe.num_calibration``)."""
    report: Report

    @staticmethod
    def of(recipe: FrozenRecipe, engine: Engine, prompts: Sequence[Prompt], out: Path, report: Report) -> TrainContext:
        """Shuffle the rows and share them out.

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
        last, first = recipe.held_back, recipe.held_back + recipe.num_calibration
        if len(pairs) <= first:
            calibrating = f" and {recipe.num_calibration} for calibration" if recipe.num_calibration else ""
            raise ConfigError(
                f"{len(pairs)} rows leave nothing to train on with held_back {last}{calibrating}; lower them"
            )
        return TrainContext(recipe, engine, pairs[first:], pairs[:last], pairs[last:first], report)

    def timed(self, saved: Saved) -> list[Run]:
        """Time plain decoding and what was trained on held-back prompts, by the code and kernels that decode."""
        asked, ready = [prompt for prompt, _ in self.held_back[:NUM_MEASURED]], saved.load()
        questions = [BenchmarkPrompt(prompt, tuple(self.engine.tokenizer.encode_prompt(prompt))) for prompt in asked]
        systems = [MethodSystem(name, ready, max_new_tokens=64) for name in ("plain", saved.method)]
        return summarise(run_benchmark(systems, questions, repeats=1), "plain")

    def batches(self, pairs: Sequence[Pair]) -> list[TokenBatch]:
        """Return batches of some rows, each row once, in order of length."""
        rows = Rows(self.engine.tokenizer, self.recipe.longest).encode(pairs)
        return [collate(group) for group in grouped(rows, self.recipe.tokens_per_batch)]

    def data(self) -> DataSplit[TokenBatch]:
        """Return endless batches of the rows to train on, and those held back."""
        rows, recipe = Rows(self.engine.tokenizer, self.recipe.longest), self.recipe
        return DataSplit(
            Batches(lambda rng, number: self.train, rows, tokens_per_batch=recipe.tokens_per_batch, seed=recipe.seed),
            self.batches(self.held_back),
        )

    def plan_text(self, base: str) -> str:
        """Return what a resumed run must repeat."""
        rows = len(self.held_back) + len(self.train) + len(self.calibration)
        return json.dumps({"recipe": asdict(self.recipe), "base": base, "rows": rows}, sort_keys=True)

    def require_memory(self, objective: DecoderObjective, depth: int) -> None:
        """Say what training takes, and refuse what would not fit.

        Raises:
            CapacityError: not enough memory.
        """
        model = self.engine.model
        optimiser = Optimiser(objective.groups(), self.recipe.optimiser)
        weights = [*model.parameters(), *optimiser.params]
        part = replace(model.config, num_layers=depth)
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
