"""Models beside each other on task files: what each gets right, and how far the others are from the first.

* *accuracy*: rows whose right choice has the highest log-likelihood, or whose continuation the model would write;
* *by byte*: the same with log-likelihoods divided by the bytes of the option, so that length does not decide;
* *perplexity*: ``exp`` of the mean negative log-likelihood a token, of right options and of texts;
* *KL*: mean divergence of the model's next-token distribution from the first model's, at every token that is scored;
* *flips*: rows that another choice has won than with the first model, whether it is right or wrong (Dutta et al. 2024,
  arXiv:2407.09141: accuracy may stay while answers change).

Differences from the first model have intervals by the paired bootstrap over rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vivace.adapters.pool.pool import AUTO
from vivace.checkpoint.tokenizer import Tokenizer, require_same_pieces
from vivace.decode.request import Lead
from vivace.errors import UnsupportedError
from vivace.evaluate.bootstrap import Interval, paired_bootstrap
from vivace.evaluate.likelihood import ContextOptions, LikelihoodReader, ScoredOptions, likelihood, question_of
from vivace.evaluate.zeroshot import TaskRow
from vivace.train.distillation import divergence

WINDOW = 512
"""Tokens of a piece of a text, which begins without context; its first token is not counted."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class JudgedSystem:
    """A model as it is judged."""

    name: str
    engine: ScoredOptions
    adapter: str | None = None
    """Name of the LoRA that it wears."""
    soft_prompt: str = AUTO
    """Which soft prompt of the engine's pool, if it has one, stands in front of each row: the name of a member, "none",
    or "auto", with which the first layer chooses. It chooses once a row, from what all contexts of the row begin with,
    and never from an option; a row that wears a LoRA then has none."""


@dataclass
class Marks:
    """What one system has made of the rows of a task, one value for each row or piece."""

    right: list[float] = field(default_factory=list)
    right_by_byte: list[float] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    """Negative log-likelihood of what is right, in nats."""
    counts: list[int] = field(default_factory=list)
    """Tokens of that."""
    divergences: list[float] = field(default_factory=list)
    """Summed over the tokens of all options."""
    num_compared: list[int] = field(default_factory=list)
    """Number of those tokens."""


@dataclass(frozen=True)
class Judgement:
    """One system on one task."""

    task: str
    system: str
    num_rows: int
    accuracy: float | None
    """None for texts."""
    accuracy_by_byte: float | None
    nll: float
    """Nats a token of what is right."""
    perplexity: float
    kl: float | None
    """Nats a token from the first system; None for the first itself."""
    flips: float | None
    accuracy_change: Interval | None
    """Accuracy minus the first system's."""
    by_byte_change: Interval | None
    nll_change: Interval | None
    """Nats a row or piece minus the first system's."""


def judge(
    systems: Sequence[JudgedSystem],
    rows: Sequence[TaskRow],
    *,
    window: int = WINDOW,
    on_progress: Progress | None = None,
) -> list[Judgement]:
    """Judge systems on the rows of task files, task by task.

    Args:
        systems: the models; the others are compared with the first.
        rows: of one task or several.
        window: tokens of a piece of a text.
        on_progress: called with the number of rows done and of all.

    Raises:
        CapacityError: a text is longer than a model's context.
        MismatchError: tokenizers differ, so that likelihoods of tokens cannot be compared.
        ConfigError: a system names a soft prompt that its pool does not have.
        UnsupportedError: a system names both a soft prompt and a LoRA.
    """
    found: list[Judgement] = []
    for task, marks in marked(systems, rows, window=window, on_progress=on_progress):
        found += [_judgement(task, system.name, own, marks[0]) for system, own in zip(systems, marks, strict=True)]
    return found


@torch.inference_mode()
def marked(
    systems: Sequence[JudgedSystem],
    rows: Sequence[TaskRow],
    *,
    window: int = WINDOW,
    on_progress: Progress | None = None,
) -> Iterator[tuple[str, list[Marks]]]:
    """Yield each task with what the systems have made of its rows, in their order; arguments and errors are those of
    ``judge``.
    """
    for other in systems[1:]:
        require_same_pieces(systems[0].engine.tokenizer, other.engine.tokenizer)
    readers = [_reader(system) for system in systems]
    done = 0
    for task in dict.fromkeys(row.task for row in rows):
        marks = [Marks() for _ in systems]
        for row in (each for each in rows if each.task == task):
            for piece in _pieces(row, systems[0].engine, min(window, _longest(systems))):
                _mark(piece, systems, readers, marks)
            done += 1
            if on_progress is not None:
                on_progress(done, len(rows))
        yield task, marks


def mean_accuracy(found: Sequence[Judgement], system: str) -> float | None:
    """Return the mean over tasks of a system's accuracy by byte; None where nothing is chosen."""
    values = [each.accuracy_by_byte for each in found if each.system == system and each.accuracy_by_byte is not None]
    return sum(values) / len(values) if values else None


def _reader(system: JudgedSystem) -> LikelihoodReader:
    return LikelihoodReader(system.engine.model, system.engine.adapters.worn(system.adapter))


def _lead(system: JudgedSystem, row: TaskRow | ContextOptions) -> Lead | None:
    """Return the soft prompt that a row stands behind."""
    pool, asked = system.engine.prompt_pool, system.soft_prompt
    if pool is None or (asked == AUTO and system.adapter is not None):
        return None
    if system.adapter is not None:
        raise UnsupportedError("a soft prompt cannot be combined with a LoRA; leave out one of them")
    context = row.context if isinstance(row, ContextOptions) else shared_context(row, system.engine.tokenizer)
    return pool.member(asked, context)


def shared_context(row: TaskRow, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that all contexts of a row begin with, from which its soft prompt is chosen."""
    contexts = [tokenizer.encode(context) for context in row.contexts]
    count = next((at for at, tokens in enumerate(zip(*contexts, strict=False)) if len(set(tokens)) > 1), None)
    return contexts[0][:count] or contexts[0]


def _longest(systems: Sequence[JudgedSystem]) -> int:
    return min(system.engine.model.config.max_positions for system in systems)


def _pieces(row: TaskRow, engine: ScoredOptions, window: int) -> Iterator[TaskRow | ContextOptions]:
    """Yield a row of choices as it is, and a text in windows."""
    if row.text is None:
        yield row
        return
    tokens = engine.tokenizer.encode(row.text, special=False)
    for at in range(0, len(tokens) - 1, window):
        piece = tuple(tokens[at : at + window])
        if len(piece) > 1:
            yield ContextOptions(piece[:1], (piece[1:],))


def _mark(
    row: TaskRow | ContextOptions,
    systems: Sequence[JudgedSystem],
    readers: Sequence[LikelihoodReader],
    marks: Sequence[Marks],
) -> None:
    """Let all systems read one row, and note what each makes of it."""
    first: list[Tensor] = []
    for system, reader, own in zip(systems, readers, marks, strict=True):
        asked = [row] if isinstance(row, ContextOptions) else list(_questions(row, system.engine))
        lead = _lead(system, row)
        logits = [each for question in asked for each in reader.logits(question, lead)]
        options = [option for question in asked for option in question.options]
        values = [likelihood(*each) for each in zip(logits, options, strict=True)]
        gold = 0 if isinstance(row, ContextOptions) else row.gold or 0
        own.lost.append(-values[gold].total)
        own.counts.append(values[gold].num_tokens)
        if isinstance(row, TaskRow):
            sizes = [len(option.encode()) for option in row.options] * len(row.contexts)
            totals = [value.total for value in values]
            by_byte = [total / size for total, size in zip(totals, sizes, strict=True)]
            is_choice = row.gold is not None
            own.chosen.append(_highest(totals) if is_choice else int(values[0].is_greedy))
            own.right.append(float(own.chosen[-1] == row.gold if is_choice else values[0].is_greedy))
            own.right_by_byte.append(float(_highest(by_byte) == row.gold) if is_choice else own.right[-1])
        if not first:
            first = logits
        if all(mine.shape == theirs.shape for mine, theirs in zip(logits, first, strict=True)):
            kl = sum(float(divergence(mine, theirs)) for mine, theirs in zip(logits, first, strict=True))
            own.divergences.append(kl)
            own.num_compared.append(sum(map(len, logits)))


def _questions(row: TaskRow, engine: ScoredOptions) -> Iterator[ContextOptions]:
    for context in row.contexts:
        yield question_of(engine.tokenizer, context, row.options)


def _highest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _judgement(task: str, name: str, own: Marks, first: Marks) -> Judgement:
    """Return the values of a task from those of its rows."""
    nll = sum(own.lost) / sum(own.counts) if sum(own.counts) else math.nan  # texts of one token ask for nothing
    is_first, chooses = own is first, bool(own.right)
    tokens = sum(own.num_compared)
    flips = [mine != theirs for mine, theirs in zip(own.chosen, first.chosen, strict=True)]
    return Judgement(
        task,
        name,
        len(own.lost),
        _mean(own.right),
        _mean(own.right_by_byte),
        nll,
        math.exp(min(nll, 700.0)),
        None if is_first or not tokens else sum(own.divergences) / tokens,
        None if is_first else _mean(flips),
        None if is_first or not chooses else paired_bootstrap(own.right, first.right),
        None if is_first or not chooses else paired_bootstrap(own.right_by_byte, first.right_by_byte),
        None if is_first or not own.lost else paired_bootstrap(own.lost, first.lost),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
