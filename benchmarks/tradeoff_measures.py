"""Quality and cost of each way to decode: what a lossy method loses, and what it gains.

A text is judged by the task's metrics and by the whole model: by how likely the model finds the text (``nll``), and by
the share of its tokens that the model would have chosen after the same words (``agreement``). Costs are counted, so
that they hold on other machines too, and measured:

* *layer passes*: rows times layers per new token, including accelerated rows, filling the cache of skipped layers,
  and rejected draft tokens.
* *bytes read*: bytes of weights per new token, when one sequence is decoded alone: a pass reads each of its layers
  once.

Intervals are paired bootstraps over prompts of the difference to plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from vivace.errors import ConfigError
from vivace.evaluate.benchmark import Record, Run
from vivace.evaluate.bootstrap import Interval, paired_bootstrap
from vivace.evaluate.fidelity import Scorer, read_answer
from vivace.evaluate.overlap import rouge_l
from vivace.evaluate.quality import SQL_TASKS, score
from vivace.evaluate.slots import slot_errors
from vivace.evaluate.sql import is_exact_match
from vivace.prompts import Prompt


@dataclass(frozen=True)
class Reading:
    """Sizes of a model's weights."""

    layers: int
    """N: number of layers."""
    layer_bytes: float
    """Bytes of one layer."""
    head_bytes: float
    """Bytes of the head."""

    @property
    def pass_bytes(self) -> float:
        """Bytes of a whole pass."""
        return self.layers * self.layer_bytes + self.head_bytes


@dataclass(frozen=True)
class Guessing:
    """What drafting a token runs and reads, for a method that drafts with the layers below an exit layer."""

    exit_layer: int
    """Number of layers below the exit layer."""
    read: float = 1.0
    """Share of the layers' bytes that drafting reads; less than 1 for a draft with quantized layers."""
    head_read: float = 1.0
    """Share of the head's bytes that drafting reads."""

    @property
    def is_quantized(self) -> bool:
        """Whether drafting uses quantized layers, so that verification runs the layers below the exit layer again."""
        return self.read < 1


@dataclass(frozen=True)
class Judgement:
    """The answers of one method, judged by the task's metrics and by the whole model."""

    metrics: dict[str, dict[str, float]]
    """Metrics of ``evaluate/quality.py``."""
    values: tuple[float, ...]
    """ROUGE-L over 100, or exact match, of each prompt."""
    slot_errors: tuple[float, ...]
    """Number of slot errors of each prompt, if the task has slots."""
    nll: tuple[float, ...]
    """Mean negative log-likelihood per token of each prompt's answer."""
    agreement: float


@dataclass(frozen=True)
class Point:
    """Quality and cost of one way to decode."""

    method: str
    lossless: bool
    speedup: float
    speedup_interval: tuple[float, float]
    layer_passes: float
    """Number of layer passes per new token."""
    read_share: float
    """Bytes read per new token, relative to plain decoding of the base."""
    num_different: int
    """Number of answers that differ from plain decoding's of the base."""
    early_exit_share: float | None
    metrics: dict[str, dict[str, float]]
    quality: float
    """Mean of the per-prompt values."""
    quality_change: tuple[float, float, float]
    """Difference to plain decoding, and its interval."""
    slot_errors_change: tuple[float, float, float] | None
    nll: float
    nll_change: tuple[float, float, float]
    agreement: float


def judge_texts(
    whole: Scorer,
    prompts: Sequence[Prompt],
    asked: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    texts: Sequence[str],
) -> Judgement:
    """Judge one method's answers.

    Args:
        whole: the base model, which scores every text.
        prompts: prompts with references, all of one task.
        asked: the prompts' tokens.
        answers: the new tokens of each answer.
        texts: the text of each answer.

    Raises:
        ConfigError: the prompts are of several tasks, or lack references.
    """
    tasks = {prompt.task for prompt in prompts}
    if len(tasks) != 1 or not all(prompt.references for prompt in prompts):
        raise ConfigError(f"a trade-off is of one task whose prompts have references, found {sorted(map(str, tasks))}")
    [task] = tasks
    if task in SQL_TASKS:
        values = [float(is_exact_match(t, p.references)) for p, t in zip(prompts, texts, strict=True)]
    else:
        values = [value / 100 for value in rouge_l(texts, [prompt.references for prompt in prompts])]
    errors = [slot_errors(str(p.request), t) for p, t in zip(prompts, texts, strict=True)] if task == "e2e" else []
    read = [read_answer(whole, one, other) for one, other in zip(asked, answers, strict=True)]
    hits = list(chain.from_iterable(found for _, found in read))
    return Judgement(
        metrics=score(list(prompts), list(texts)),
        values=tuple(values),
        slot_errors=tuple(float(e.num_wrong + e.num_missing + e.num_added) for e in errors),
        nll=tuple(sum(lost) / max(1, len(lost)) for lost, _ in read),
        agreement=sum(hits) / max(1, len(hits)),
    )


def costs(record: Record, reading: Reading, guessing: Guessing | None) -> tuple[float, float]:
    """Return layer passes and bytes read per new token.

    Args:
        record: trials of one sequence at a time.
        reading: sizes of the model that decoded.
        guessing: how the method drafts with the layers below an exit layer; other drafts count as free.
    """
    trials = [batch[0] for batch in record.trials]
    tokens = sum(trial.num_tokens for trial in trials)
    layers = [layer for trial in trials for layer in trial.exit_layers]
    if layers:
        passes = sum(trial.num_layer_passes for trial in trials) / len(layers)
        return passes, sum(layers) / len(layers) * reading.layer_bytes + reading.head_bytes
    steps, drafted = sum(trial.num_steps for trial in trials), sum(trial.num_drafted for trial in trials)
    steps = steps or tokens
    passes, read = (steps + drafted) * reading.layers, steps * reading.pass_bytes
    if guessing is not None:
        passes += drafted * guessing.exit_layer * (2 if guessing.is_quantized else 1)
        below = guessing.exit_layer * reading.layer_bytes * guessing.read
        read += drafted * (below + reading.head_bytes * guessing.head_read)
    return passes / tokens, read / tokens


def point(run: Run, lossless: bool, cost: tuple[float, float], found: Judgement, plain: Judgement) -> Point:
    """Return all results of one way to decode; ``cost`` is layer passes and the share of plain decoding's bytes."""
    return Point(
        method=run.method,
        lossless=lossless,
        speedup=run.speedup,
        speedup_interval=run.speedup_interval,
        layer_passes=cost[0],
        read_share=cost[1],
        num_different=run.num_different,
        early_exit_share=run.early_exit_share,
        metrics=found.metrics,
        quality=sum(found.values) / len(found.values),
        quality_change=_change(found.values, plain.values),
        slot_errors_change=_change(found.slot_errors, plain.slot_errors) if found.slot_errors else None,
        nll=sum(found.nll) / len(found.nll),
        nll_change=_change(found.nll, plain.nll),
        agreement=found.agreement,
    )


def envelope(points: Sequence[Point]) -> list[str]:
    """Return the methods that no other beats in both quality and bytes read, the cheapest first."""
    best, names = float("-inf"), []
    for one in sorted(points, key=lambda p: (p.read_share, -p.quality)):
        if one.quality > best:
            best = one.quality
            names.append(one.method)
    return names


def _change(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean difference to plain decoding, and its interval."""
    found: Interval = paired_bootstrap(ours, theirs)
    return found.estimate, found.low, found.high
