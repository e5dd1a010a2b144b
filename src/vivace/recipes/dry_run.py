"""What a training beside a frozen decoder needs, found out before it begins (``vivace train --dry-run``).

Two ways lead to the same figures. A decoder that is in memory makes two steps on random tokens, after which the second
is timed, and decodes a few tokens of as many texts as its own text is written in at once. Of a checkpoint whose weights
are not there, or that does not fit into memory, only ``config.json`` is read: its decoder is built without memory (on
PyTorch's device ``meta``), bytes are those of its tensors, and times are computed from its multiplications and bytes
at the rates that this machine reaches in a product of matrices and in reading memory (Williams et al. 2009, roofline).
Every figure says which of the two it is. Computed times are lower bounds: kernels that reach these rates do nothing but
multiply and read.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from vivace.checkpoint.draft_vocabulary import FILE as VOCABULARY
from vivace.checkpoint.files import resolve, tensor_paths
from vivace.checkpoint.load import choose_device, choose_dtype, load_config, read_config
from vivace.checkpoint.quantized.settings import dtype_of
from vivace.checkpoint.tokenizer import find_tokenizer
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.decode.session import Session
from vivace.engine import Engine, Options
from vivace.errors import NotFoundError, UnsupportedError
from vivace.evaluate.roofline import matrix_rate, read_bandwidth
from vivace.kernels.choice import KernelChoice
from vivace.methods.composition import Methods
from vivace.prompts import Prompt
from vivace.recipes import own_text
from vivace.recipes.answers import AnswersFile
from vivace.recipes.frozen import OWN_TEXT, FrozenRecipe, Trainable, TrainContext
from vivace.recipes.regenerate import as_it_decodes, decodes_apart
from vivace.train.batches import BatchPlace
from vivace.train.config import TrainConfig
from vivace.train.data import TokenBatch, pairs_of, questions_of, texts_of
from vivace.train.loop import BEST, step_seconds
from vivace.train.memory import MemoryEstimate, free_bytes
from vivace.train.optim import Optimiser
from vivace.train.report import Lines
from vivace.train.resume import STATE
from vivace.train.variation import Pair

How = Literal["measured", "computed", "given"]
DECODED = 24
"""Tokens of each text that are decoded to measure how fast own text is written."""
ROW_BYTES = 120
"""Bytes of a row of own text beside its prompt and answer."""
TOKEN_BYTES = 4.5
"""Bytes of a token of text."""
DRAWN, ANSWERED = 0.75, 0.25
"""Lengths of drawn prompts and of answers, as shares of what they may be: those that a chat model of 135 M weights
wrote, half of whose prompts were cut and most of whose answers ended where they began to repeat themselves."""
REGENERATED = 48
"""Tokens of a regenerated answer, half of the most it may have."""


@dataclass(frozen=True)
class TextToLearn:
    """What there is to learn from."""

    num_rows: int
    """Rows of prompt files or of a file of answers; 0 where the decoder writes all text itself."""
    is_answered: bool
    """Whether the rows are learnt as they are, and nothing is written."""

    @staticmethod
    def of(recipe: FrozenRecipe, prompts: Sequence[Prompt], answers: AnswersFile | None) -> TextToLearn:
        """Return what a recipe learns from.

        Raises:
            ConfigError: it could not learn from these rows.
        """
        if answers is not None:
            return TextToLearn(len(answers.pairs), is_answered=True)
        if recipe.own_tokens:
            return TextToLearn(len(set(questions_of(prompts))), is_answered=False)
        if recipe.regenerate:
            return TextToLearn(len(set(texts_of(prompts))), is_answered=False)
        return TextToLearn(len(pairs_of(prompts)), is_answered=True)


@dataclass(frozen=True)
class Figure:
    """One number of an estimate."""

    value: float
    unit: str
    """"B", "s", or the plural of what is counted."""
    how: How


@dataclass(frozen=True)
class DryRun:
    """What a training would need."""

    figures: Mapping[str, Figure]
    """By what they are of, in the order in which they are shown."""
    memory: MemoryEstimate | None
    """Of the training; None where nothing is trained and text only calibrates."""
    fits: bool | None
    """Whether the memory is free; None where the system does not say."""
    files: Mapping[str, int]
    """Bytes of the files that would be written, by their path below the folder of the result."""
    notes: Sequence[str]
    """What the figures leave out."""


class _Imagined(TrainContext):
    """A context without text: batches are of random tokens, and all tokens are equally frequent."""

    def batches(self, pairs: Sequence[Pair]) -> list[TokenBatch]:
        """Return one batch."""
        return [_random_batch(self.recipe, self.engine.model)]

    def frequent(self) -> Tensor:
        """Return all tokens."""
        return torch.arange(self.engine.model.config.vocab_size, dtype=torch.int32, device="cpu")


class _RandomBatches:
    """Endless batches of random tokens (a ``BatchSource``)."""

    def __init__(self, recipe: FrozenRecipe, model: Decoder) -> None:
        self._recipe, self._model = recipe, model

    def start_at(self, place: BatchPlace) -> Iterator[tuple[BatchPlace, TokenBatch]]:
        """Yield batches; all places are alike."""
        for index in itertools.count(place.index):
            yield BatchPlace(place.epoch, index + 1), _random_batch(self._recipe, self._model)


def _random_batch(recipe: FrozenRecipe, model: Decoder) -> TokenBatch:
    """Return a batch as large as a recipe's may be, of texts as long as they may be; a quarter of each is prompt."""
    length = max(8, min(recipe.longest, model.config.max_positions) // 8 * 8)
    shape = max(1, recipe.tokens_per_batch // length), length
    tokens = torch.randint(0, model.config.vocab_size, shape, device="cpu").to(model.device)
    scored = torch.zeros(shape, dtype=torch.bool, device=model.device)
    scored[:, length // 4 :] = True
    return TokenBatch(tokens, scored)


def is_loadable(folder: Path, device: torch.device) -> bool:
    """Return whether the weights of a checkpoint are there and fit into the free memory of a device."""
    try:
        size = sum(path.stat().st_size for path in set(tensor_paths(folder).values()))
    except NotFoundError:
        return False
    free = free_bytes(device)
    return free is None or size < free


def without_weights(model: str | Path, dtype: str, device: str, ignored: Sequence[str] = ()) -> Engine:
    """Return an engine whose decoder has shapes and no memory, from ``config.json`` alone.

    Raises:
        NotFoundError: there is no ``config.json``.
        UnsupportedError: its family or a setting is not supported, or there is no such device.
    """
    folder = resolve(model)
    raw, config = read_config(folder, ignored), load_config(folder, ignored)
    kind = choose_dtype(dtype, dtype_of(raw) or "float32", choose_device(device))
    with torch.device("meta"):
        decoder = Decoder(config).to(kind).requires_grad_(False)
    methods = Methods(decoder, folder, {})
    return Engine(decoder, find_tokenizer(folder), methods, {}, KernelChoice("torch", "nothing is computed", None))


def dry_run(recipe: FrozenRecipe, engine: Engine, text: TextToLearn, device: torch.device) -> DryRun:
    """Estimate a training.

    Args:
        recipe: what would be trained and how.
        engine: the frozen decoder on PyTorch's kernels, or one of ``without_weights``. Its parameters stay as they are.
        text: what there is to learn from.
        device: where it would be trained.

    Raises:
        UnsupportedError: the result could not decode with this model.
        ConfigError: the recipe does not fit the model.
    """
    model = engine.model
    if (reason := recipe.why_not(model)) is not None:
        raise UnsupportedError(reason)
    recipe = recipe.without_search(model.config)
    context = _Imagined(recipe, engine, [], [], [], Lines(lambda text: None), Path())
    with torch.device("meta") if model.device.type == "meta" else nullcontext():
        trainable = recipe.begin(context)
    return _Estimate(context, trainable, text, device).made()


class _Estimate:
    """One call of ``dry_run``; figures are added in the order in which they are shown."""

    def __init__(self, context: TrainContext, trainable: Trainable, text: TextToLearn, device: torch.device) -> None:
        self.context, self.recipe, self.model = context, context.recipe, context.engine.model
        self.trainable, self.text, self.device = trainable, text, device
        self.is_loaded = self.model.device.type != "meta"
        self.figures: dict[str, Figure] = {}
        self.notes: list[str] = []
        self.timed: How = "measured" if self.is_loaded else "computed"

    def made(self) -> DryRun:
        """Compute and measure everything."""
        objective, memory, files = self.trainable.objective, None, dict[str, int]()
        params = sum(part.numel() for part in self.model.parameters())
        self.figures["weights of the model"] = Figure(params, "weights", "measured" if self.is_loaded else "computed")
        if not self.is_loaded:
            self.matrices = matrix_rate(self.device, self._multiplied_in(), self.model.config.width)
            self.bandwidth = read_bandwidth(self.device)
            self.figures["products of matrices here"] = Figure(self.matrices, "FLOP/s", "measured")
            self.figures["reading memory here"] = Figure(self.bandwidth, "B/s", "measured")
        if objective is not None:
            memory = self.context.memory(self.trainable)
            for name in ("weights", "gradients", "optimiser", "activations"):
                self.figures[f"memory: {name}"] = Figure(getattr(memory, name), "B", "computed")
            files = self._files(objective.groups())
        writing = self._writing()
        fits = self._peak(memory, writing)
        if self.text.is_answered:
            self._rows(self.text.num_rows)
        minutes = self._write(files) if writing else 0.0
        if objective is not None:
            minutes += self._train()
            self.notes.append("evaluations on held-back rows and the timing of the result come on top")
        else:
            self.notes.append("no weights are trained; what calibrates them takes further minutes, not estimated")
        if (count := self.recipe.num_trainings) > 1:
            minutes *= count
            self.notes.append(f"{count} trainings follow one another; each needs the figures above the last one")
        self.figures["minutes in all"] = Figure(minutes, "min", self.timed)
        return DryRun(self.figures, memory, fits, files, tuple(self.notes))

    def _multiplied_in(self) -> torch.dtype:
        return torch.bfloat16 if self.recipe.loop.autocast else self.model.dtype

    def _files(self, groups: Sequence[Mapping[str, object]]) -> dict[str, int]:
        """Return the bytes of weights and snapshots."""
        optimiser = Optimiser(groups, self.recipe.optimiser)
        count = sum(part.numel() for part in optimiser.params)
        kept = sum(part.nbytes for part in _tensors(optimiser.state()))
        found = {"weights": count * self.model.dtype.itemsize, f"run/{STATE}": kept}
        if hasattr(getattr(self.recipe, "plan", None), "vocabulary"):
            found[VOCABULARY] = 4 * self.model.config.vocab_size
        found[f"run/{BEST}"] = sum(part.nbytes for part in optimiser.params)
        return found

    def _writing(self) -> int:
        """Return the bytes that writing text needs beside the weights of the training, 0 if none is written."""
        if not self._asked_tokens():
            return 0
        c = self.model.config
        longest = min(self.recipe.longest, c.max_positions)
        entries = 2 * c.num_kv_heads * c.head_dim * c.num_layers * longest * self.model.dtype.itemsize
        copies = _bytes(self.model) if decodes_apart(self.device) else 0
        return copies + own_text.together_on(self.device).slots * entries

    def _asked_tokens(self) -> int:
        """Return how many tokens of text are to be written."""
        if self.text.is_answered:
            return 0
        return self.recipe.own_tokens or REGENERATED * min(self.recipe.regenerate, self.text.num_rows)

    def _peak(self, memory: MemoryEstimate | None, writing: int) -> bool | None:
        """Add the most memory that is needed at once, and what is free; return whether it suffices."""
        weights = memory.weights if memory is not None else _bytes(self.model)
        peak = max(weights + writing, memory.total if memory is not None else 0)
        if writing:
            self.figures["memory: writing text, beside weights"] = Figure(writing, "B", "computed")
        self.figures["memory at the most"] = Figure(peak, "B", "computed")
        free = free_bytes(self.device)
        if free is None:
            return None
        free += weights if self.is_loaded else 0  # they are in memory already
        self.figures["memory that is free for it"] = Figure(free, "B", "measured")
        return peak <= free

    def _write(self, files: dict[str, int]) -> float:
        """Add what writing text takes; return its minutes."""
        tokens, c = self._asked_tokens(), self.model.config
        longest = min(self.recipe.longest, c.max_positions)
        prompt = DRAWN * min(own_text.LONGEST_PROMPT, longest // 2)
        answer = max(1.0, ANSWERED * (longest - prompt)) if self.recipe.own_tokens else REGENERATED
        is_drawn = bool(self.recipe.own_tokens) and not self.text.num_rows
        if self.is_loaded:
            rate = _decoding_rate(as_it_decodes(self.context.engine), longest, is_drawn=is_drawn)
        else:
            rate = self._rate(longest)
        minutes = tokens * (1 + is_drawn * prompt / answer) / rate / 60
        if self.recipe.own_minutes is not None and minutes > self.recipe.own_minutes:
            tokens = int(tokens * self.recipe.own_minutes / minutes)
            minutes = self.recipe.own_minutes
        self.figures["text to write"] = Figure(tokens, "tokens", "computed" if self.recipe.own_minutes else "given")
        self.figures["writing it"] = Figure(rate, "tokens/s", self.timed)
        self.figures["minutes of writing"] = Figure(minutes, "min", self.timed)
        self._rows(int(tokens / answer))
        files[f"run/{OWN_TEXT}"] = int(tokens * TOKEN_BYTES * (1 + prompt / answer) + tokens / answer * ROW_BYTES)
        self.notes.append("prompts are taken to be .75 as long as they may be, and answers .25")
        return minutes

    def _rows(self, count: int) -> None:
        """Add how many rows there are to learn from, and say if they are too few."""
        self.figures["rows"] = Figure(count, "rows", "given" if self.text.is_answered else "computed")
        least = self.recipe.num_held_back(count) + self.recipe.num_calibration
        if count <= least:
            self.notes.append(f"{count} rows leave nothing to train on with {least} held back; lower held_back")

    def _rate(self, longest: int) -> float:
        """Return how many tokens a second a batch of texts gains at the rates of this machine."""
        c, slots = self.model.config, own_text.together_on(self.device).slots
        weights = sum(part.numel() for part in self.model.parameters())
        entries = 2 * c.num_kv_heads * c.head_dim * c.num_layers * self.model.dtype.itemsize * longest / 2
        read = (_bytes(self.model) + slots * entries) / self.bandwidth
        return slots / max(read, 2 * weights * slots / self.matrices)

    def _train(self) -> float:
        """Add what the steps take; return their minutes."""
        recipe, loop, objective = self.recipe, self.recipe.loop, self.trainable.objective
        assert objective is not None
        if self.is_loaded:
            config = TrainConfig(loop, recipe.optimiser, recipe.seed)
            seconds = step_seconds(self.model, objective, _RandomBatches(recipe, self.model), config)
        else:
            seconds = self._flops(objective.groups()) * loop.accumulate / self.matrices
        steps = loop.steps if loop.minutes is None else max(0, int(60 * loop.minutes / seconds))
        assert steps is not None
        minutes = loop.minutes if loop.minutes is not None else steps * seconds / 60
        self.figures["a step"] = Figure(seconds, "s", self.timed)
        self.figures["tokens of a step"] = Figure(recipe.tokens_per_batch * loop.accumulate, "tokens", "given")
        self.figures["steps"] = Figure(steps, "steps", "given" if loop.minutes is None else self.timed)
        self.figures["minutes of training"] = Figure(minutes, "min", self.timed if loop.minutes is None else "given")
        if steps < 2:
            self.notes.append("the minutes are over before a second step: give more, or lower tokens_per_batch")
        return minutes

    def _flops(self, groups: Sequence[Mapping[str, object]]) -> float:
        """Return the operations of a batch: a frozen pass, one with gradients through ``depth`` layers, and the head.

        A product with a frozen matrix takes 2 operations a weight and token and 2 more on the way back, one with a
        trained matrix 6 in all.
        """
        c, recipe = self.model.config, self.recipe
        layers = sum(part.numel() for part in self.model.layers.parameters())
        trained = sum(part.numel() for part in Optimiser(groups, recipe.optimiser).params)
        head = (getattr(getattr(recipe, "plan", None), "vocabulary", 0) or c.vocab_size) * c.width
        deep = layers * min(1.0, self.trainable.depth / c.num_layers)
        return recipe.tokens_per_batch * (2 * layers + 4 * deep + 6 * trained + 0.75 * 6 * head)


def _bytes(model: Decoder) -> int:
    return sum(part.nbytes for part in model.parameters())


def _tensors(state: object) -> Iterator[Tensor]:
    """Yield the tensors in nested lists and mappings."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        yield from itertools.chain.from_iterable(map(_tensors, state.values()))
    elif isinstance(state, list):
        yield from itertools.chain.from_iterable(map(_tensors, state))


def _decoding_rate(engine: Engine, longest: int, *, is_drawn: bool) -> float:
    """Return how many tokens a second a batch of texts gains while all of them are being written.

    Args:
        engine: decodes them.
        longest: largest number of tokens of a text.
        is_drawn: whether every third of them is a prompt that is drawn, as where there are no others.
    """
    count, prompt = own_text.together_on(engine.model.device).slots, max(1, min(16, longest // 4))
    session = Session(engine.model, num_slots=count, capacity=prompt + DECODED + 1, memory=engine.memory)
    generator = torch.Generator().manual_seed(0)
    options = Options(max_new_tokens=DECODED, do_sample=False, method="plain")
    try:
        for number in range(count):
            tokens = torch.randint(0, engine.model.config.vocab_size, (prompt,), generator=generator).tolist()
            request = engine.request_for(tokens, options)
            draws = is_drawn and number % 3 == 0
            sampling = Sampling(do_sample=True) if draws else request.sampling
            session.admit(replace(request, sampling=sampling, stop=replace(request.stop, end_tokens=frozenset())))
        running, made, began, found = set[int](), 0, None, 0.0
        while found == 0.0:
            emitted = session.step()
            running |= {each.request_id for each in emitted}
            if began is not None:
                made += sum(len(each.tokens) for each in emitted)
                if any(each.finish_reason is not None for each in emitted):
                    found = made / (time.perf_counter() - began)
            elif len(running) == count:  # all prompts are read
                began = time.perf_counter()
        return found
    finally:
        session.close()
