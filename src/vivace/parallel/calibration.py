"""What is seen at every sum over ranks while texts pass: ranges as in the paper, and steps of the least squared error.

Ranges are exponential moving averages over texts (Dong et al. 2024, arXiv:2411.07942): the first one sets them, each
further one moves them by ``GAMMA``. So they depend on the order of texts. Steps come from a histogram of each feature's
numbers in units of the mean absolute number of their row, as rows have factors where these steps are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vivace.core.config import ModelConfig
from vivace.core.summed import Point
from vivace.errors import ConfigError
from vivace.kernels.wire import LEAST_STEP
from vivace.parallel.collective import SameWire, Wire
from vivace.parallel.lowbit import SITES, Calibration

GAMMA = 0.01
"""How far one text moves a range."""
BINS = 64
PER_OCTAVE = 4
"""Bins of the histogram in which numbers double."""
_SMALLEST = -8
"""Power of two at the lower end of the histogram."""
EVERY = 4
"""Of so many rows one is counted in the histogram."""


@dataclass
class FeatureRange:
    """What one rank, or the sum, has shown at one point; tensors are (E,), and (E, BINS)."""

    low: Tensor | None = None
    high: Tensor | None = None
    counts: Tensor | None = None

    def update(self, x: Tensor) -> None:
        """Take in the rows (T, E) of one text.

        Raises:
            ConfigError: one of their numbers is not finite, so that there is no range.
        """
        wide = x.float()
        if not bool(wide.isfinite().all()):
            raise ConfigError(
                "a sum over ranks is not finite for one of the texts; leave that text out, or try --dtype float32"
            )
        low, high = wide.amin(0), wide.amax(0)
        if self.low is None or self.high is None:
            self.low, self.high = low, high
            self.counts = torch.zeros(wide.shape[1] * BINS)
        else:
            self.low = (1 - GAMMA) * self.low + GAMMA * low
            self.high = (1 - GAMMA) * self.high + GAMMA * high
        some = wide[::EVERY].abs()
        relative = some / some.mean(1, keepdim=True).clamp(min=LEAST_STEP)
        bins = ((relative.log2() - _SMALLEST) * PER_OCTAVE).clamp(0, BINS - 1).long()
        assert self.counts is not None
        self.counts += torch.bincount((bins + torch.arange(x.shape[1]) * BINS).view(-1), minlength=len(self.counts))

    def step(self) -> Tensor:
        """Return the steps (E,) of codes of four bits with the least squared error over what was counted."""
        assert self.counts is not None
        counts = self.counts.view(-1, BINS)
        sizes = 2.0 ** ((torch.arange(BINS) + 0.5) / PER_OCTAVE + _SMALLEST)
        tried = 2.0 ** torch.arange(_SMALLEST - 3, 6, 1 / 8)
        codes = (sizes[None] / tried[:, None]).round().clamp(max=7)
        errors = (sizes[None] - codes * tried[:, None]).square()  # (steps, BINS)
        return tried[(counts @ errors.T).argmin(1)]


@dataclass
class Seen:
    """What a world of ranks has shown, by point and source; the source of sums is the number of ranks."""

    num_ranks: int
    ranges: dict[tuple[Point, int], FeatureRange] = field(default_factory=dict)

    def update(self, x: Tensor, point: Point, source: int) -> None:
        """Take in the rows (T, E) that a rank sends at a point, if that is one where sums are rounded."""
        if point[1] in SITES:
            self.ranges.setdefault((point, source), FeatureRange()).update(x)

    def wire(self, rank: int) -> Wire:
        """Return the form in which a rank sends rows while they are looked at."""
        return _WatchedWire(self, rank)

    def calibration(self, config: ModelConfig, dtype: str) -> Calibration:
        """Return ranges and steps of all sums of a model."""
        points = [(layer, site) for layer in range(config.num_layers) for site in SITES]

        def stacked(of: Callable[[FeatureRange], Tensor | None]) -> Tensor:
            rows = [[of(self.ranges[point, source]) for source in range(self.num_ranks + 1)] for point in points]
            return torch.stack([torch.stack([part for part in row if part is not None]) for row in rows])

        return Calibration(
            self.num_ranks,
            dtype,
            stacked(lambda seen: seen.low),
            stacked(lambda seen: seen.high),
            stacked(FeatureRange.step),
        )


class _WatchedWire(SameWire):
    """Implements ``Wire``: rows travel as they are and are looked at; rank 0 looks at sums."""

    most_in_one_shot = 1 << 20

    def __init__(self, seen: Seen, rank: int) -> None:
        self._seen = seen
        self._rank = rank

    def encode(self, x: Tensor, point: Point, source: int | None) -> tuple[Tensor, ...]:
        self._seen.update(x, point, self._rank)
        return super().encode(x, point, source)

    def added(self, parts: Sequence[Sequence[Tensor]], point: Point, dtype: torch.dtype) -> Tensor:
        total = super().added(parts, point, dtype)
        if self._rank == 0:
            self._seen.update(total, point, self._seen.num_ranks)
        return total
