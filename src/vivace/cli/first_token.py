"""How long the first token of an answer takes, by length of the prompt and by the way in which it is read."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vivace.errors import ConfigError
from vivace.prefill.table import find_prefill

if TYPE_CHECKING:
    from vivace.decode.stats import DecodeStats
    from vivace.engine import Engine
    from vivace.prefill.schedule import Schedule

SPACE = 8
"""Tokens of the context that are left for an answer whose length is not said."""


@dataclass(frozen=True)
class FirstToken:
    """What one way of reading took for prompts of one length."""

    prefill: str
    num_tokens: int
    first_token_s: float
    """Median over the repeats."""
    seconds: tuple[float, ...]
    """Of each repeat, in order."""
    predicted_share: float
    """Share of a full reading's layer passes that the schedule says."""
    measured_share: float
    """Share of them that was counted."""
    speedup: float
    """First token of the full reading over this one, medians."""
    predicted_s: float
    """Time that the schedule says, from full readings of as many tokens as each of its parts has."""
    answer_s: float
    """Median time to the last token of the answer."""
    answer_speedup: float
    """Whole answer behind the full reading over this one, medians."""
    decode_tokens_per_s: float
    """Median rate of the tokens behind the first one."""


def prompt_of(engine: Engine, texts: Sequence[str], length: int, new_tokens: int = SPACE) -> list[int]:
    """Return a prompt of so many tokens: these texts one behind the other, again from the first if they are too few.

    Raises:
        ConfigError: it leaves no room for an answer, or there is no text.
    """
    most = engine.model.config.max_positions - new_tokens
    if not 2 <= length <= most:
        raise ConfigError(
            f"a prompt of {length} tokens; this model can be measured with 2 to {most}, and {new_tokens} behind them"
        )
    once = [token for text in texts for token in engine.tokenizer.encode(text + "\n")]
    if not once:
        raise ConfigError("the prompts are empty; give some with text")
    return (once * -(-length // len(once)))[:length]


def measure_first_tokens(
    engine: Engine,
    texts: Sequence[str],
    lengths: Sequence[int],
    prefills: Sequence[str],
    keep: str | None,
    repeats: int,
    *,
    new_tokens: int = 2,
) -> tuple[list[FirstToken], float | None]:
    """Read prompts of several lengths in several ways, in turns, and decode plainly behind them.

    The first reading of each length in each way is not timed.

    Args:
        engine: the model, without caches of prompts.
        texts: what prompts are made of.
        lengths: of the prompts, in tokens.
        prefills: ways to read them; "full" has to be among them.
        keep: schedule of those that prune; None is their own.
        repeats: timed readings of each length in each way.
        new_tokens: tokens of an answer, at least 2.

    Returns:
        The figures, and the share of the cores' time that other processes used meanwhile.

    Raises:
        ConfigError: a way is unknown or "full" is missing, or a length cannot be.
    """
    from vivace.evaluate.others import watched_others

    if "full" not in prefills:
        raise ConfigError(f"prefills {', '.join(prefills)}: full is the baseline of every figure; add it")
    ways: dict[str, dict[str, Any]] = {}
    for name in prefills:
        prunes = find_prefill(name).keep is not None
        ways[name] = {"prefill": name, **({"keep": keep, "min_prompt": 1} if prunes else {})}
    prompts = {length: prompt_of(engine, texts, length, new_tokens) for length in lengths}
    schedules = {name: _schedule_of(engine, name, keep) for name in ways}
    rows = []
    with watched_others() as others:
        for length, prompt in prompts.items():
            measured: dict[str, list[DecodeStats]] = {name: [] for name in ways}
            parts = {count for schedule in schedules.values() for count in schedule.counts(length)} - {length}
            full: dict[int, list[DecodeStats]] = {count: [] for count in sorted(parts)} | {length: measured["full"]}
            for turn in range(repeats + 1):
                for name in list(ways) if turn % 2 else list(reversed(ways)):
                    options = {"method": "plain", "max_new_tokens": new_tokens, "ignore_eos": True, **ways[name]}
                    stats = engine.generate(prompt, **options)[0].stats
                    if turn:
                        measured[name].append(stats)
                for count in parts:  # each is what a part of a schedule is predicted from
                    options = {"method": "plain", "max_new_tokens": 1, "ignore_eos": True, **ways["full"]}
                    stats = engine.generate(prompt[:count], **options)[0].stats
                    if turn:
                        full[count].append(stats)
            seconds = {count: _median(found, _first_token_s) for count, found in full.items()}
            rows += [_row(engine, name, schedules[name], length, measured, seconds) for name in ways]
    return rows, others.cpu_share


def _schedule_of(engine: Engine, name: str, keep: str | None) -> Schedule:
    """Return the schedule of a way of reading; one without points for those that prune nothing."""
    from vivace.prefill.schedule import Schedule

    spec = find_prefill(name)
    return Schedule(()) if spec.keep is None else engine.prefills.schedule(spec, keep)


def _row(
    engine: Engine,
    name: str,
    schedule: Schedule,
    length: int,
    measured: Mapping[str, Sequence[DecodeStats]],
    full_s: Mapping[int, float],
) -> FirstToken:
    """Return the figures of one way and one length.

    Args:
        engine: the model.
        name: of the way.
        schedule: of the way.
        length: of the prompt.
        measured: each way's readings.
        full_s: first tokens of full readings, by length.
    """
    from vivace.prefill.reading_time import pruned_time

    own, full, num_layers = measured[name], measured["full"], engine.model.config.num_layers
    first, answer = _median(own, _first_token_s), _median(own, _answer_s)
    return FirstToken(
        prefill=name,
        num_tokens=length,
        first_token_s=first,
        seconds=tuple(stats.first_token_s for stats in own),
        predicted_share=schedule.share(length, num_layers),
        measured_share=own[-1].num_prompt_layer_passes / ((length - 1) * num_layers),
        speedup=_median(full, _first_token_s) / first,
        predicted_s=pruned_time(full_s.__getitem__, schedule, length, num_layers),
        answer_s=answer,
        answer_speedup=_median(full, _answer_s) / answer,
        decode_tokens_per_s=_median(own, lambda stats: stats.tokens_per_s),
    )


def _median(measured: Sequence[DecodeStats], figure: Callable[[DecodeStats], float]) -> float:
    return statistics.median(figure(stats) for stats in measured)


def _first_token_s(stats: DecodeStats) -> float:
    return stats.first_token_s


def _answer_s(stats: DecodeStats) -> float:
    return stats.first_token_s + stats.decode_s
