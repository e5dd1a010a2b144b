"""How long the first token of an answer takes, by length of the prompt and by the way in which it is read."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vivace.errors import ConfigError
from vivace.prefill.table import find_prefill

if TYPE_CHECKING:
    from vivace.decode.stats import DecodeStats
    from vivace.engine import Engine
    from vivace.prefill.reading_time import ReadingTime

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
    predicted_s: float | None
    """Time that the schedule says, from full readings of two lengths or more; None where there is one."""
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
    from vivace.prefill.reading_time import ReadingTime

    if "full" not in prefills:
        raise ConfigError(f"prefills {', '.join(prefills)}: full is the baseline of every figure; add it")
    ways: dict[str, dict[str, Any]] = {}
    for name in prefills:
        prunes = find_prefill(name).keep is not None
        ways[name] = {"prefill": name, **({"keep": keep, "min_prompt": 1} if prunes else {})}
    prompts = {length: prompt_of(engine, texts, length, new_tokens) for length in lengths}
    measured: dict[int, dict[str, list[DecodeStats]]] = {}
    with watched_others() as others:
        for length, prompt in prompts.items():
            measured[length] = {name: [] for name in ways}
            for turn in range(repeats + 1):
                for name in list(ways) if turn % 2 else list(reversed(ways)):
                    options = {"method": "plain", "max_new_tokens": new_tokens, "ignore_eos": True, **ways[name]}
                    stats = engine.generate(prompt, **options)[0].stats
                    if turn:
                        measured[length][name].append(stats)
    full = {length: _median(found["full"], _first_token_s) for length, found in measured.items()}
    fit = ReadingTime.fit(full)
    rows = [
        _row(engine, name, keep, length, stats, found["full"], fit)
        for length, found in measured.items()
        for name, stats in found.items()
    ]
    return rows, others.cpu_share


def _row(
    engine: Engine,
    name: str,
    keep: str | None,
    length: int,
    measured: Sequence[DecodeStats],
    full: Sequence[DecodeStats],
    fit: ReadingTime | None,
) -> FirstToken:
    """Return the figures of one way and one length, beside full readings of that length."""
    from vivace.prefill.schedule import Schedule

    spec, num_layers = find_prefill(name), engine.model.config.num_layers
    schedule = Schedule(()) if spec.keep is None else engine.prefills.schedule(spec, keep)
    first, answer = _median(measured, _first_token_s), _median(measured, _answer_s)
    return FirstToken(
        prefill=name,
        num_tokens=length,
        first_token_s=first,
        seconds=tuple(stats.first_token_s for stats in measured),
        predicted_share=schedule.share(length, num_layers),
        measured_share=measured[-1].num_prompt_layer_passes / ((length - 1) * num_layers),
        speedup=_median(full, _first_token_s) / first,
        predicted_s=None if fit is None else fit.pruned(schedule, length, num_layers),
        answer_s=answer,
        answer_speedup=_median(full, _answer_s) / answer,
        decode_tokens_per_s=_median(measured, lambda stats: stats.tokens_per_s),
    )


def _median(measured: Sequence[DecodeStats], figure: Callable[[DecodeStats], float]) -> float:
    return statistics.median(figure(stats) for stats in measured)


def _first_token_s(stats: DecodeStats) -> float:
    return stats.first_token_s


def _answer_s(stats: DecodeStats) -> float:
    return stats.first_token_s + stats.decode_s
