"""Confidence intervals by resampling: whether two systems differ by more than the choice of prompts explains.

The paired bootstrap (Efron 1979; Koehn 2004 for text metrics) draws prompts with replacement and takes both
systems' values of the drawn prompts, so that what makes a prompt hard or slow for both cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vivace.errors import ConfigError

DRAWN_AT_ONCE = 1 << 22
"""Largest number of draws that are held at once, 32 MiB."""

Statistic = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]
"""Function from two arrays ``(..., n)`` of per-prompt values to an array ``(...,)``; it works on the last axis."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    estimate: float
    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return f"{self.estimate:.3g} [{self.low:.3g}, {self.high:.3g}]"


def mean_difference(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute mean(a) - mean(b) over the last axis."""
    return np.asarray(a.mean(-1) - b.mean(-1))


def ratio_of_sums(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute sum(a) / sum(b) over the last axis, e.g. the speed-up from the seconds of the baseline and of the
    method.
    """
    return np.asarray(a.sum(-1) / b.sum(-1))


def paired_bootstrap(
    a: Sequence[float],
    b: Sequence[float],
    *,
    statistic: Statistic = mean_difference,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Compute the percentile interval of a statistic of two systems' values on the same prompts.

    Args:
        a: values of one system, one per prompt.
        b: values of the other, in the same order.
        statistic: the quantity that is estimated.
        confidence: share of resamples inside the interval, in (0, 1).
        num_resamples: number of times the prompts are drawn.
        seed: the same seed gives the same interval.

    Raises:
        ConfigError: there are no values, the lengths differ, or the confidence is outside (0, 1).
    """
    if len(a) != len(b) or not len(a):
        raise ConfigError(f"paired values have equal lengths of at least 1, found {len(a)} and {len(b)}")
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence lies between 0 and 1, found {confidence}")
    first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    generator = np.random.default_rng(seed)
    at_once = max(1, DRAWN_AT_ONCE // len(first))
    counts = [min(at_once, num_resamples - begun) for begun in range(0, num_resamples, at_once)]
    draws = (generator.integers(0, len(first), (count, len(first))) for count in counts)
    values = np.concatenate([statistic(first[drawn], second[drawn]) for drawn in draws])
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(statistic(first, second)), float(low), float(high), confidence)
