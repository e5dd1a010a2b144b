"""How long the first token of an answer takes, by length of the prompt and by the way in which it is read."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vivace.errors import ConfigError
from vivace.prefill.table import find_prefill

if TYPE_CHECKING:
    from vivace.engine import Engine

SPACE = 8
"""Tokens of the context that are left for the answer."""


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


def prompt_of(engine: Engine, texts: Sequence[str], length: int) -> list[int]:
    """Return a prompt of so many tokens: these texts one behind the other, again from the first if they are too few.

    Raises:
        ConfigError: it leaves no room for an answer, or there is no text.
    """
    context = engine.model.config.max_positions
    if not 2 <= length <= context - SPACE:
        raise ConfigError(f"a prompt of {length} tokens; this model can be measured with 2 to {context - SPACE}")
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
) -> tuple[list[FirstToken], float | None]:
    """Read prompts of several lengths in several ways, in turns.

    The first reading of each length in each way is not timed.

    Args:
        engine: the model, without caches of prompts.
        texts: what prompts are made of.
        lengths: of the prompts, in tokens.
        prefills: ways to read them; "full" has to be among them.
        keep: schedule of those that prune; None is their own.
        repeats: timed readings of each length in each way.

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
    prompts = {length: prompt_of(engine, texts, length) for length in lengths}
    found = []
    with watched_others() as others:
        for length, prompt in prompts.items():
            times: dict[str, list[float]] = {name: [] for name in ways}
            passes: dict[str, int] = {}
            for turn in range(repeats + 1):
                for name in list(ways) if turn % 2 else list(reversed(ways)):
                    options = {"method": "plain", "max_new_tokens": 2, "ignore_eos": True, **ways[name]}
                    stats = engine.generate(prompt, **options)[0].stats
                    passes[name] = stats.num_prompt_layer_passes
                    if turn:
                        times[name].append(stats.first_token_s)
            num_layers = engine.model.config.num_layers
            full = statistics.median(times["full"])
            for name, seconds in times.items():
                spec, median = find_prefill(name), statistics.median(seconds)
                is_pruned = spec.keep is not None
                share = engine.prefills.schedule(spec, keep).share(length, num_layers) if is_pruned else 1.0
                measured = passes[name] / ((length - 1) * num_layers)
                found.append(FirstToken(name, length, median, tuple(seconds), share, measured, full / median))
    return found, others.cpu_share
