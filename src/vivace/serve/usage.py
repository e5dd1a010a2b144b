"""Counts of the work done for a request, under OpenAI's and vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from vivace.serve.choice import Choice


def usage(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> dict[str, Any]:
    """Return OpenAI's ``usage``, in which drafts are called predictions.

    Args:
        prompts: tokens of each prompt, which count once.
        choices: those of the first prompt, of the second, and so on. What a prompt took from a cache is what its first
            choice took; the others also take what the first has read.
    """
    num_prompt_tokens, each = sum(map(len, prompts)), max(1, len(choices) // len(prompts))
    firsts = [choice.stats for choice in choices[::each] if choice.stats is not None]
    done = [choice.stats for choice in choices if choice.stats is not None]
    written = sum(len(choice.tokens) for choice in choices)
    drafted = sum(stats.num_draft_tokens for stats in done)
    accepted = sum(stats.num_accepted_draft_tokens for stats in done)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": written,
        "total_tokens": num_prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": sum(stats.num_cached_tokens for stats in firsts)},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def metrics(choices: Sequence[Choice], arrived_at: float, queue_s: float) -> dict[str, Any]:
    """Figures of one request under vLLM's names, all choices together.

    Args:
        choices: finished ones.
        arrived_at: when the request came, on the monotonic clock.
        queue_s: how long it waited for a slot.
    """
    begun = [choice for choice in choices if choice.first_at]
    first = min((choice.first_at for choice in begun), default=arrived_at)
    last = max((choice.last_at for choice in begun), default=arrived_at)
    num_tokens = sum(len(choice.tokens) for choice in choices)
    # tokens that came with the first block take no time after it
    behind = max(0, num_tokens - sum(choice.stats.num_first_tokens for choice in choices if choice.stats))
    rate = behind / (last - first) if last > first else 0.0
    return {
        "time_to_first_token_ms": 1e3 * (first - arrived_at) if begun else None,
        "generation_time_ms": 1e3 * (last - first),
        "queue_time_ms": 1e3 * queue_s,
        "mean_itl_ms": 1e3 / rate if rate else None,
        "tokens_per_second": rate,
        "method": choices[0].stats.method if choices and choices[0].stats else None,
        "auto_choice": next((choice.auto_choice for choice in choices if choice.auto_choice), None),
        "speculative_decoding": speculation(choices),
        "early_exits": early_exits(choices),
        "prefill": reading(choices),
        "prompt_pool": next((c.stats.prompt_pool for c in choices if c.stats), None),
        "guard": {name: score for c in choices if c.stats for name, score in c.stats.guard.items()},
    }


def early_exits(choices: Sequence[Choice]) -> dict[str, Any] | None:
    """Return where tokens exited; None for methods without early exits."""
    layers = [layer for choice in choices if choice.stats for layer in choice.stats.exit_layers]
    if not layers:
        return None
    done = [choice.stats for choice in choices if choice.stats is not None]
    return {
        "share": sum(stats.num_early_exits for stats in done) / len(layers),
        "mean_exit_layer": sum(layers) / len(layers),
        "layer_passes_per_token": sum(stats.num_layer_passes for stats in done) / len(layers),
    }


def reading(choices: Sequence[Choice]) -> dict[str, Any] | None:
    """Return how the prompt was read, and behind which layers how many of its tokens went on."""
    done = [choice.stats for choice in choices if choice.stats is not None]
    if not done:
        return None
    first = done[0]
    return {
        "name": first.prefill,
        "reason": first.prefill_reason,
        "kept": first.prompt_kept,
        "computed": first.prompt_computed,
    }


def speculation(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return counters of drafts. Mean acceptance length is 1 + accepted / steps, acceptance rate accepted / drafted."""
    done = [choice.stats for choice in choices if choice.stats is not None]
    steps = sum(stats.num_spec_steps for stats in done)
    drafted = sum(stats.num_draft_tokens for stats in done)
    accepted = sum(stats.num_accepted_draft_tokens for stats in done)
    depth = max((len(stats.drafted_per_position) for stats in done), default=0)
    reached = _summed([stats.accepted_per_position for stats in done], depth)
    tried = _summed([stats.drafted_per_position for stats in done], depth)
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "num_spec_tokens": depth,
        "acceptance_histogram": _histogram(steps, reached),
        "acceptance_per_position": [a / t if t else 0.0 for a, t in zip(reached, tried, strict=True)],
        "tokens_per_target_pass": sum(len(choice.tokens) for choice in choices) / steps if steps else 0.0,
    }


def _summed(lists: Sequence[Sequence[int]], length: int) -> list[int]:
    return [sum(numbers[place] for numbers in lists if place < len(numbers)) for place in range(length)]


def _histogram(steps: int, reached: Sequence[int]) -> list[int]:
    """Return the number of steps in which exactly 0, 1, 2, ... guesses were accepted."""
    at_least = [steps, *reached, 0]
    return [more - further for more, further in pairwise(at_least)]
