"""The parts that every training beside a frozen decoder has: the recipe, the data, the weights and the result."""

from __future__ import annotations

import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.checkpoint.draft_vocabulary import first_of, ranked, save_vocabulary
from vivace.checkpoint.files import require_folder
from vivace.core.config import ModelConfig
from vivace.core.draft_head import DraftHead
from vivace.core.model import Decoder
from vivace.engine import Engine
from vivace.errors import ConfigError, MismatchError, UnsupportedError
from vivace.evaluate.benchmark import BenchmarkPrompt, Run, run_benchmark, summarise
from vivace.evaluate.systems import MethodSystem
from vivace.prompts import Prompt
from vivace.recipes.answers import AnswersFile
from vivace.recipes.own_text import Budget, own_text, written_before
from vivace.recipes.regenerate import OverLora, as_it_decodes, regenerated
from vivace.train.batches import DataSplit
from vivace.train.config import LoopConfig
from vivace.train.data import (
    Batches,
    DecoderObjective,
    Row,
    Rows,
    TokenBatch,
    Untold,
    asked,
    pairs_of,
    questions_of,
    shuffled_groups,
    take_groups,
    texts_of,
)
from vivace.train.memory import MemoryEstimate, estimate_memory, require_memory
from vivace.train.optim import Optimiser, OptimiserConfig
from vivace.train.report import Report
from vivace.train.resume import STATE
from vivace.train.variation import Pair, digest_of

NUM_MEASURED = 24
"""Number of held-back prompts on which the result of a training is timed."""
MEASURED_TOKENS = 64
"""Longest answer to one of them."""
OWN_HELD_BACK = 8
"""At most one of so many rows of the base's own text is held back."""
OWN_TEXT = "own.jsonl"
"""Name of the file of the base's own text, beside the snapshots of the run."""
ZERO = "zero"
"""What weights begin with that change nothing at first."""


@dataclass(frozen=True, kw_only=True)
class FrozenRecipe(ABC):
    """How to train the weights of a method beside a frozen decoder."""

    kind: str
    """The method, or another word that ``vivace train`` knows."""
    loop: LoopConfig
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    tokens_per_batch: int = 4096
    """Upper bound on the tokens of a batch, padding included."""
    longest: int = 512
    """Largest number of tokens in a row; longer rows are left out."""
    held_back: int = 256
    """Number of held-back rows, on which the best weights are selected and the result is timed."""
    regenerate: int = 0
    """Number of prompts whose answers the base generates before the training; they replace those of the data, because
    what counts is how often a draft agrees with the base's own text."""
    own_tokens: int = 0
    """Number of tokens of text that the base writes before the training (``own_text.py``): its greedy answers to the
    prompts of the data, if there are any, and to prompts drawn from itself. 0 learns from the data as it is."""
    own_minutes: float | None = None
    """Minutes after which writing ends, whatever there is by then; None has no limit."""
    seed: int = 0
    """Seed of the order of the rows, of initial weights and of everything drawn while training."""

    def __post_init__(self) -> None:
        if self.held_back < 1 or self.regenerate < 0 or self.longest < 8:
            raise ConfigError(
                f"held_back must be >= 1, regenerate >= 0 and longest >= 8, found {self.held_back}, "
                f"{self.regenerate} and {self.longest}"
            )
        if self.tokens_per_batch < 8:
            raise ConfigError(f"tokens_per_batch must be at least 8, found {self.tokens_per_batch}")
        if self.own_tokens < 0 or (self.own_minutes is not None and not 0 < self.own_minutes < math.inf):
            raise ConfigError(
                f"own_tokens must be >= 0 and own_minutes above 0 and finite, found {self.own_tokens} and "
                f"{self.own_minutes}"
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be between 0 and 2^63 - 1, found {self.seed}")
        if self.own_tokens and self.regenerate:
            raise ConfigError("own_tokens answers the prompts of the data too; leave out regenerate")

    @property
    def num_calibration(self) -> int:
        """Number of rows that the loop is not trained on, for what is fitted after it."""
        return 0

    @property
    def num_trainings(self) -> int:
        """Number of trainings that the recipe consists of, one after another."""
        return 1

    def num_held_back(self, rows: int) -> int:
        """Return how many of so many rows are held back: fewer than the recipe says where the base's own text is short,
        as how much it writes depends on the time there is.
        """
        most = rows // OWN_HELD_BACK
        return most if self.own_tokens and self.held_back > most > 0 else self.held_back

    @property
    def folder(self) -> str:
        """Name of the folder of the result beside the model, unless the user names another."""
        return self.kind

    @property
    def beside(self) -> tuple[str, ...]:
        """Folders and Hub ids of other checkpoints that the training reads; a run is not resumed with others there."""
        return ()

    def why_not(self, model: Decoder) -> str | None:
        """Return why the result could not decode with a model, before any text is written for it; None if it could."""
        return None

    def without_search(self, model: ModelConfig) -> FrozenRecipe:
        """Return the recipe with a stand-in for everything that ``begin`` would look for in text, as large as that."""
        return self

    @abstractmethod
    def begin(self, context: TrainContext) -> Trainable:
        """Make the untrained weights and their objective; torch's generator has the recipe's seed."""


@dataclass(frozen=True)
class TrainedAdapter:
    """The content of an adapter's folder."""

    plan: Any
    """A dataclass that says how to decode with the weights."""
    config: Any
    """A dataclass that describes the shape of the weights."""
    tensors: Mapping[str, Tensor]
    """The weights by name."""
    note: str = ""
    """Text for the report, after the number of weights."""

    def write(self, folder: Path, kind: str, base: str, model: Engine) -> str:
        """Save the adapter in the decoder's precision.

        Args:
            folder: folder to write.
            kind: method that the adapter is for.
            base: ``base_hash`` of the decoder that the adapter belongs to.
            model: that decoder.

        Returns:
            A description of what was saved, for the report.
        """
        dtype = model.model.dtype
        tensors = {
            name: value.to(dtype) if value.is_floating_point() else value for name, value in self.tensors.items()
        }
        save_adapter(folder, kind, base, asdict(self.plan), asdict(self.config), tensors)
        count = sum(tensor.numel() for tensor in tensors.values())
        return f"{count:,} weights" if tensors else "thresholds"


@dataclass(frozen=True)
class SavedTraining:
    """The result of a training on disk."""

    what: str
    """Description of what was saved, for the report."""
    method: str | None
    """Name of the method that decodes with it; None for what no method drafts with."""
    load: Callable[[], Engine] | None
    """Opens an engine that has this method."""
    note: str = ""
    """Further text for the report."""


class Trainable(ABC):
    """Trains the weights of one method: its objective for the loop, and what is done after the loop."""

    objective: DecoderObjective | None
    """The objective that the loop minimises; None where nothing is trained and thresholds are only calibrated."""
    depth: int = 1
    """Number of layers that gradients pass through, by which the memory is estimated."""

    def __init__(self, context: TrainContext) -> None:
        self.context = context

    @property
    def learner(self) -> Decoder:
        """Return the decoder whose layers gradients pass through: the base, unless subclasses train another."""
        return self.context.engine.model

    def branch_bytes(self) -> int:
        """Return the bytes that are kept for the backward pass beside those of ``depth`` layers of whole batches."""
        return 0

    @abstractmethod
    def finish(self) -> TrainedAdapter:
        """Return the trained weights; called once, after the loop, when the best weights have been restored."""

    def save(self, out: Path, base: str) -> SavedTraining:
        """Write the trained weights as an adapter of the frozen decoder; subclasses may write something else.

        Args:
            out: folder to write.
            base: ``base_hash`` of the frozen decoder.
        """
        engine, kind, trained = self.context.engine, self.context.recipe.kind, self.finish()
        what = trained.write(out, kind, base, engine)
        if hasattr(trained.plan, "vocabulary"):
            save_vocabulary(out, self.context.frequent())
        return SavedTraining(what, kind, lambda: as_it_decodes(engine, {kind: out}), trained.note)


@dataclass(frozen=True)
class TrainContext:
    """The inputs of a training: the recipe, the frozen decoder and the divided rows."""

    recipe: FrozenRecipe
    engine: Engine
    train: Sequence[Pair]
    held_back: Sequence[Pair]
    calibration: Sequence[Pair]
    """Rows that the loop is not trained on, ``FrozenRecipe.num_calibration`` of them."""
    report: Report
    folder: Path
    """Folder of the run's snapshots, for those of trainings that ``begin`` makes before it."""
    answers: AnswersFile | None = None
    """The file that all rows come from; None where they are the data's, or the base's own text of this run."""
    over: OverLora | None = None
    """The LoRA that the decoder wears; None for the base as it is."""

    @staticmethod
    def of(
        recipe: FrozenRecipe,
        engine: Engine,
        prompts: Sequence[Prompt],
        out: Path,
        report: Report,
        answers: AnswersFile | None = None,
        over: OverLora | None = None,
    ) -> TrainContext:
        """Shuffle the rows and divide them into rows to train on, held-back rows and calibration rows.

        Raises:
            ConfigError: there are too few rows, ``out`` is the base's own folder or a file, or there is other text
                beside ``answers``.
            UnsupportedError: the base's weights are packed for native kernels.
        """
        if out.resolve() == engine.folder.resolve():
            raise ConfigError(f"{out} is the model itself; its adapter belongs into {out / 'adapters' / recipe.kind}")
        require_folder(out)
        if engine.kernels.body is not None:
            raise UnsupportedError("packed weights cannot be trained on; load the model with kernels='torch'")
        if (reason := recipe.why_not(engine.model)) is not None:
            raise UnsupportedError(reason)
        if answers is None:
            pairs = _pairs(recipe, engine, prompts, out, report, over)
        else:
            pairs = _given(recipe, prompts, answers)
        if answers is not None:
            report.note(f"{len(pairs)} answers of {answers.path} are learnt from; none is written")
        last = recipe.num_held_back(len(pairs))
        if last < recipe.held_back:
            report.note(f"{last} of {len(pairs)} rows are held back: {recipe.held_back} are too many of so few")
        groups = shuffled_groups(pairs, recipe.seed)
        among = "" if len(groups) == len(pairs) else f" of {len(groups)} prompts"
        held_back, calibration = take_groups(groups, last), take_groups(groups, recipe.num_calibration)
        if not groups:
            calibrating = f" and {recipe.num_calibration} for calibration" if recipe.num_calibration else ""
            raise ConfigError(
                f"{len(pairs)} rows{among} leave nothing to train on with held_back {last}{calibrating}; lower them"
            )
        train = [pair for group in groups for pair in group]
        context = TrainContext(recipe, engine, train, held_back, calibration, report, out / "run", answers, over)
        context._rows().note_left_out(pairs, report.note)
        return context

    def timed(self, saved: SavedTraining) -> list[Run]:
        """Time plain decoding and the trained method on held-back prompts, with the kernels that decode; return nothing
        for what no method drafts with, and where nothing is asked.
        """
        measured = [prompt for prompt, _ in self.held_back if not isinstance(prompt, Untold)][:NUM_MEASURED]
        if saved.method is None or saved.load is None or not measured:
            return []
        ready = saved.load()
        encode = self.engine.tokenizer.encode_prompt
        questions = [BenchmarkPrompt(prompt, tuple(encode(prompt))) for prompt in map(asked, measured)]
        systems = [
            MethodSystem(name, ready, max_new_tokens=MEASURED_TOKENS) for name in dict.fromkeys(("plain", saved.method))
        ]
        return summarise(run_benchmark(systems, questions, repeats=1), "plain")

    def batches(self, pairs: Sequence[Pair]) -> list[TokenBatch]:
        """Return batches that hold each pair once, in order of length."""
        return self._rows().batches(pairs, self.recipe.tokens_per_batch)

    def rows(self, pairs: Sequence[Pair]) -> list[Row]:
        """Return the tokens of each pair."""
        return self._rows().encode(pairs)

    def frequent(self) -> Tensor:
        """Return the tokens of the answers to train on, the most frequent first, after those that end texts."""
        rows = self._rows().encode(self.train)
        answers = (row.tokens[row.num_prompt :] for row in rows)
        return ranked(answers, self.engine.tokenizer.eos_ids, self.engine.model.config.vocab_size)

    def draft_head(self, size: int) -> DraftHead | None:
        """Return what reads the ``size`` most frequent tokens, which alone are learnt to be guessed; None for 0."""
        return DraftHead(self.engine.model, first_of(self.frequent(), size)) if size else None

    def _rows(self) -> Rows:
        """Return what encodes pairs for the frozen decoder, on its device."""
        recipe, engine = self.recipe, self.engine
        cuts = recipe.own_tokens > 0 or self.answers is not None
        longest = min(recipe.longest, engine.model.config.max_positions)
        return Rows(engine.tokenizer, longest, engine.model.device, cuts=cuts)

    def data(self) -> DataSplit[TokenBatch]:
        """Return endless batches of the rows to train on, and the held-back batches."""
        rows, recipe = self._rows(), self.recipe
        return DataSplit(
            Batches(lambda rng, number: self.train, rows, tokens_per_batch=recipe.tokens_per_batch, seed=recipe.seed),
            self.batches(self.held_back),
        )

    def plan_text(self, base: str) -> str:
        """Return a text of the recipe, base and rows, which a resumed run must have as well."""
        rows = [*self.held_back, *self.train, *self.calibration]
        plan = {"recipe": asdict(self.recipe), "base": base, "rows": len(rows), "data": digest_of(rows)}
        if self.answers is not None:
            plan["answers"] = self.answers.digest
        if self.over is not None:
            plan["over"] = self.over.version
        if self.recipe.beside:
            plan["beside"] = [base_hash(name) for name in self.recipe.beside]
        return json.dumps(plan, sort_keys=True)

    def memory(self, trainable: Trainable) -> MemoryEstimate:
        """Return the memory that a training needs."""
        model = self.engine.model
        assert trainable.objective is not None
        optimiser = Optimiser(trainable.objective.groups(), self.recipe.optimiser)
        weights = [*model.parameters(), *optimiser.params]
        learner = trainable.learner.config  # lists by layer have as many entries as it has layers
        part = replace(learner, num_layers=trainable.depth, rope_of_layer=(), windows=(), moe_layers=())
        need = estimate_memory(part, weights, optimiser.params, optimiser.num_bytes(), self.recipe.tokens_per_batch)
        need = replace(need, activations=need.activations + trainable.branch_bytes())
        if self.engine.storage is not None:  # weights that are streamed from files are no parameters
            plan = self.engine.storage.plan
            need = replace(need, weights=need.weights + plan.buffer_bytes + plan.pool_bytes)
        return need

    def require_memory(self, trainable: Trainable) -> None:
        """Report the memory that a training needs.

        Raises:
            CapacityError: the training needs more memory than is free.
        """
        need = self.memory(trainable)
        self.report.note(f"memory: {need}")
        require_memory(need, self.engine.model.device)


def _pairs(
    recipe: FrozenRecipe, engine: Engine, prompts: Sequence[Prompt], out: Path, report: Report, over: OverLora | None
) -> list[Pair]:
    if recipe.own_tokens:
        return _own_pairs(recipe, engine, prompts, out / "run", report)
    if not recipe.regenerate:
        return pairs_of(prompts)
    texts = sorted(set(texts_of(prompts)))
    random.Random(recipe.seed).shuffle(texts)
    path = out / "run" / "regenerated.jsonl"
    return regenerated(as_it_decodes(engine, over=over), texts[: recipe.regenerate], path, report.note, over)


def _given(recipe: FrozenRecipe, prompts: Sequence[Prompt], answers: AnswersFile) -> list[Pair]:
    """Return the rows of a file of answers, beside which there is no other text."""
    if prompts or recipe.own_tokens or recipe.regenerate:
        raise ConfigError("answers are all the text that is learnt from; leave out prompts, own_tokens and regenerate")
    return list(answers.pairs)


def _own_pairs(
    recipe: FrozenRecipe, engine: Engine, prompts: Sequence[Prompt], folder: Path, report: Report
) -> list[Pair]:
    """Return the base's own text. Once the training has begun it is what it was then.

    Raises:
        MismatchError: the training began with other text.
    """
    path = folder / OWN_TEXT
    if any(folder.rglob(STATE)):  # also of a search for an exit layer, which comes before the training itself
        if not path.exists():
            raise MismatchError(
                f"{folder} has a run that began with other text than the model's own of that run; give --data or "
                "--answers as then, or start in an empty folder"
            )
        return written_before(engine, path)
    asked = sorted(set(questions_of(prompts)))
    random.Random(recipe.seed).shuffle(asked)
    budget = Budget(recipe.own_tokens, recipe.own_minutes)
    return own_text(as_it_decodes(engine), path, budget, recipe.longest, asked, report.note)
