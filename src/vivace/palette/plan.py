"""Which matrix gets how many bits: the smallest predicted loss whose bytes are within a budget.

Every matrix has a few choices, each with its bytes and its predicted loss in nats a token. Losses of matrices are taken
to add up. Choices that no mixture of their neighbours beats form a falling convex curve; going up these curves in the
order of what a byte gains is optimal for every budget that it meets exactly, and at most one step of one matrix away
from it otherwise (knapsack with several choices: Sinha & Zoltners 1979).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from vivace.errors import ConfigError


@dataclass(frozen=True)
class BitChoice:
    """A matrix in some number of bits."""

    bits: int
    num_bytes: int
    loss: float
    """Predicted loss in nats a token."""


@dataclass(frozen=True)
class BitPlan:
    """The chosen bits of every matrix."""

    bits: Mapping[str, int]
    num_bytes: int
    loss: float
    """The sum of the predicted losses."""


def plan_bits(choices: Mapping[str, tuple[BitChoice, ...]], num_weights: int, bits_per_weight: float) -> BitPlan:
    """Choose bits for each matrix.

    Args:
        choices: of each matrix, by name.
        num_weights: weights of all matrices together.
        bits_per_weight: the budget: bytes of all matrices, codebooks and scales included, times eight over weights.

    Raises:
        ConfigError: not even the least bits are within the budget; the message names what they take.
    """
    curves = {name: _curve(each) for name, each in choices.items()}
    chosen = dict.fromkeys(curves, 0)
    budget = bits_per_weight * num_weights / 8
    used = sum(curve[0].num_bytes for curve in curves.values())
    if used > budget:
        least = used * 8 / num_weights
        raise ConfigError(f"--bpw {bits_per_weight:g} cannot be had: the least possible is {least:.3f} bits a weight")
    steps = [
        ((low.loss - high.loss) / (high.num_bytes - low.num_bytes), name, place)
        for name, curve in curves.items()
        for place, (low, high) in enumerate(pairwise(curve))
    ]
    for _, name, place in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        low, high = curves[name][place : place + 2]
        if chosen[name] == place and used + high.num_bytes - low.num_bytes <= budget:
            chosen[name], used = place + 1, used + high.num_bytes - low.num_bytes
    picked = {name: curves[name][place] for name, place in chosen.items()}
    return BitPlan({name: each.bits for name, each in picked.items()}, used, sum(each.loss for each in picked.values()))


def _curve(choices: tuple[BitChoice, ...]) -> list[BitChoice]:
    """Return the choices that are on the lower convex hull of loss over bytes, from the fewest bytes on."""
    hull: list[BitChoice] = []
    for choice in sorted(choices, key=lambda each: (each.num_bytes, each.loss)):
        if hull and choice.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _gain(low: BitChoice, high: BitChoice) -> float:
    return (low.loss - high.loss) / (high.num_bytes - low.num_bytes)
