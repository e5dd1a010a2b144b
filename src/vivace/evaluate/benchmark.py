"""The benchmark harness: several systems answer the same prompts, in turns, on one machine.

A *system* answers batches of prompts; it is a decoding method of ours, or another engine (a *peer*). A *trial* is one
batch answered once. Every system answers a batch before the next batch begins, so that a slow minute
of the machine affects all of them alike. Their order is drawn anew each time, since a system that follows another
engine finds the processor's cache full of that engine's weights. For each batch the median over the repeats counts.

``tokens_per_s`` is the number of tokens after the first block over the time after it (for plain decoding a block is
one token; a drafter's first block may have several, and none of them count). The end-to-end rate is all tokens over
the whole time, prompt included. ``mean_acceptance_length`` is 1 + accepted / steps, as vLLM defines it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import Protocol

from vivace.errors import ConfigError
from vivace.evaluate.bootstrap import Interval, paired_bootstrap, ratio_of_sums
from vivace.prompts import Asked

ORDER_SEED = 0
"""Seed of the order of systems; it is fixed, so that a benchmark can be repeated in the same order."""
Progress = Callable[[int, int], None]
"""Called with the number of trials done and their total."""


@dataclass(frozen=True)
class BenchmarkPrompt:
    """One prompt, as a user writes it and as token ids."""

    request: Asked
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """One batch, answered once."""

    token_ids: tuple[tuple[int, ...], ...]
    """New tokens of each prompt."""
    num_first_tokens: int
    """Number of tokens in the first blocks, all prompts together."""
    decode_s: float
    """Seconds from the first block to the last token."""
    total_s: float
    """Seconds from the call to its return."""
    prefill_s: float | None = None
    draft_s: float | None = None
    verify_s: float | None = None
    peak_memory_bytes: int | None = None
    num_steps: int = 0
    """Number of target passes after the prompt, summed over prompts; 0 if the system does not report it."""
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    exit_layers: tuple[int, ...] = ()
    """Number of layers below the exit of each new token, for a method with early exits."""
    num_early_exits: int = 0
    num_layer_passes: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of new tokens, all prompts together."""
        return sum(map(len, self.token_ids))


class System(Protocol):
    """A system that answers batches of prompts."""

    @property
    def name(self) -> str:
        """Name in tables and files."""

    def answer(self, batch: Sequence[BenchmarkPrompt]) -> Trial:
        """Answer one batch with greedy decoding."""


@dataclass(frozen=True)
class Named:
    """A system under a name of its own, such as one method with several drafts or in several formats."""

    name: str
    system: System

    def answer(self, batch: Sequence[BenchmarkPrompt]) -> Trial:
        """Answer one batch."""
        return self.system.answer(batch)


@dataclass
class Record:
    """All trials of one system: ``trials[batch][repeat]``."""

    name: str
    trials: list[list[Trial]] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """The results of one system, as they are stored."""

    method: str
    tokens_per_s: float
    tokens_per_s_spread: tuple[float, float]
    """Lowest and highest rate of the repeats."""
    speedup: float
    """``tokens_per_s`` over the baseline's."""
    speedup_interval: tuple[float, float]
    """95 % bootstrap interval over batches."""
    end_to_end_tokens_per_s: float
    end_to_end_speedup: float
    """The speed-up of whole answers, reading the prompt included."""
    end_to_end_interval: tuple[float, float]
    identical: bool
    """Whether every answer has the baseline's token ids."""
    num_different: int
    """Number of prompts with an answer other than the baseline's."""
    num_tokens: int
    mean_acceptance_length: float | None
    acceptance_per_position: tuple[float, ...]
    tokens_per_target_pass: float | None
    prefill_s: float | None
    draft_s: float | None
    verify_s: float | None
    """Like ``prefill_s`` and ``draft_s``: seconds summed over all prompts, medians over repeats."""
    peak_memory_bytes: int | None
    early_exit_share: float | None = None
    """Share of the new tokens that left early; None for methods without early exits."""
    mean_exit_layer: float | None = None
    first_token_ms: float | None = None
    """Milliseconds from the call to the first block of tokens: median of the repeats, mean of the batches."""
    layer_passes_per_token: float | None = None
    """Number of rows times layers per token, including accelerated rows and filling the cache of skipped layers."""


def run_benchmark(
    systems: Sequence[System],
    questions: Sequence[BenchmarkPrompt],
    *,
    batch_size: int = 1,
    repeats: int = 3,
    warm_up: int = 2,
    on_progress: Progress | None = None,
) -> list[Record]:
    """Let every system answer every prompt.

    Args:
        systems: the systems to compare.
        questions: the prompts.
        batch_size: number of prompts answered together.
        repeats: number of times each system answers each batch.
        warm_up: number of batches that each system answers before the measurement.
        on_progress: called with the number of trials done and their total.

    Raises:
        ConfigError: there is no system or no prompt, or a count is below 1.
    """
    if not systems or not questions or batch_size < 1 or repeats < 1:
        raise ConfigError(
            f"a bench needs a method, a prompt, a batch and a repeat, found {len(systems)} methods, "
            f"{len(questions)} prompts, batch {batch_size}, {repeats} repeats"
        )
    batches = [questions[start : start + batch_size] for start in range(0, len(questions), batch_size)]
    for batch in batches[:warm_up]:
        for system in systems:
            system.answer(batch)
    records = [Record(system.name, [[] for _ in batches]) for system in systems]
    total, done = repeats * len(batches) * len(systems), 0
    orders = Random(ORDER_SEED)
    for _ in range(repeats):
        for index, batch in enumerate(batches):
            for place in orders.sample(range(len(systems)), len(systems)):
                records[place].trials[index].append(systems[place].answer(batch))
                done += 1
                if on_progress is not None:
                    on_progress(done, total)
    return records


def summarise(records: Sequence[Record], baseline: str) -> list[Run]:
    """Compute the results of every system, relative to the baseline.

    Raises:
        ConfigError: the baseline did not take part.
    """
    base = next((record for record in records if record.name == baseline), None)
    if base is None:
        raise ConfigError(f"the baseline {baseline!r} is not among {', '.join(record.name for record in records)}")
    return [_summarise(record, base) for record in records]


def tokens_per_s(record: Record) -> float:
    """Return the decoding rate of a system over all batches."""
    return _rate([_batch_rate(trials) for trials in record.trials])


def _summarise(record: Record, base: Record) -> Run:
    """Compute the results of one system, relative to the baseline's record."""
    trials = [trial for batch in record.trials for trial in batch]
    firsts = [batch[0] for batch in record.trials]
    repeats = [_rate([_batch_rate([trial]) for trial in round_]) for round_ in zip(*record.trials, strict=True)]
    num_different = sum(_num_different(ours, theirs) for ours, theirs in zip(record.trials, base.trials, strict=True))
    steps = sum(trial.num_steps for trial in firsts)
    gain, whole = _speedup(record, base, _batch_rate), _speedup(record, base, _whole_rate)
    layers = [layer for trial in firsts for layer in trial.exit_layers]
    return Run(
        method=record.name,
        tokens_per_s=tokens_per_s(record),
        tokens_per_s_spread=(min(repeats), max(repeats)),
        speedup=gain.estimate,
        speedup_interval=(gain.low, gain.high),
        end_to_end_tokens_per_s=_rate([_whole_rate(batch) for batch in record.trials]),
        end_to_end_speedup=whole.estimate,
        end_to_end_interval=(whole.low, whole.high),
        identical=num_different == 0,
        num_different=num_different,
        num_tokens=sum(trial.num_tokens for trial in firsts),
        mean_acceptance_length=1 + sum(trial.num_accepted for trial in firsts) / steps if steps else None,
        acceptance_per_position=_acceptance(firsts),
        tokens_per_target_pass=sum(trial.num_tokens for trial in firsts) / steps if steps else None,
        prefill_s=_sum_of_medians([[trial.prefill_s for trial in batch] for batch in record.trials]),
        draft_s=_sum_of_medians([[trial.draft_s for trial in batch] for batch in record.trials]),
        verify_s=_sum_of_medians([[trial.verify_s for trial in batch] for batch in record.trials]),
        peak_memory_bytes=max((trial.peak_memory_bytes or 0 for trial in trials), default=0) or None,
        first_token_ms=1000 * fmean(_median([t.total_s - t.decode_s for t in batch]) for batch in record.trials),
        early_exit_share=sum(trial.num_early_exits for trial in firsts) / len(layers) if layers else None,
        mean_exit_layer=sum(layers) / len(layers) if layers else None,
        layer_passes_per_token=sum(trial.num_layer_passes for trial in firsts) / len(layers) if layers else None,
    )


Timing = Callable[[Sequence[Trial]], tuple[int, float]]
"""Function from the trials of a batch to a number of tokens and the median time for them."""


def _speedup(record: Record, base: Record, timing: Timing) -> Interval:
    """Return the ratio of the rates, which is the ratio of the times if the answers are equally long, with its
    interval.
    """
    ours, theirs = ([timing(trials) for trials in one.trials] for one in (record, base))
    scaled = [seconds * (ours[i][0] / tokens if tokens else 1.0) for i, (tokens, seconds) in enumerate(theirs)]
    interval = paired_bootstrap(scaled, [max(seconds, 1e-12) for _, seconds in ours], statistic=ratio_of_sums)
    ratio = _rate(ours) / _rate(theirs) if _rate(theirs) else 0.0
    return Interval(ratio, interval.low, interval.high, interval.confidence)


def _batch_rate(trials: Sequence[Trial]) -> tuple[int, float]:
    """Return the number of tokens after the first blocks, and the median time for them."""
    return trials[0].num_tokens - trials[0].num_first_tokens, _median([trial.decode_s for trial in trials])


def _whole_rate(trials: Sequence[Trial]) -> tuple[int, float]:
    """Return the number of all tokens, and the median time from the call to its return."""
    return trials[0].num_tokens, _median([trial.total_s for trial in trials])


def _rate(pairs: Sequence[tuple[int, float]]) -> float:
    """Return tokens per second from (tokens, seconds) of each batch."""
    seconds = sum(pair[1] for pair in pairs)
    return sum(pair[0] for pair in pairs) / seconds if seconds > 0 else 0.0


def _num_different(ours: Sequence[Trial], theirs: Sequence[Trial]) -> int:
    """Count the prompts of a batch for which some trial differs from the baseline's first answer."""
    expected = theirs[0].token_ids
    return sum(any(trial.token_ids[row] != ids for trial in ours) for row, ids in enumerate(expected))


def _acceptance(trials: Sequence[Trial]) -> tuple[float, ...]:
    """Return, for each draft position, the share of the drafted tokens there that were accepted."""
    depth = max((len(trial.drafted_per_position) for trial in trials), default=0)
    drafted, accepted = [0] * depth, [0] * depth
    for trial in trials:
        for position, (tried, kept) in enumerate(
            zip(trial.drafted_per_position, trial.accepted_per_position, strict=True)
        ):
            drafted[position] += tried
            accepted[position] += kept
    return tuple(kept / tried for kept, tried in zip(accepted, drafted, strict=True) if tried)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _sum_of_medians(batches: Sequence[Sequence[float | None]]) -> float | None:
    """Sum the median over repeats over the batches; None if it was not measured."""
    known = [[value for value in batch if value is not None] for batch in batches]
    return sum(_median(batch) for batch in known) if all(known) else None
