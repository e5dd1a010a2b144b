"""Configuration of foresight: what is trained, how decoding uses it, and what it is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from vivace.errors import ConfigError


@dataclass(frozen=True)
class ForesightConfig:
    """The sizes of what is trained."""

    rate: float | None = 2.0
    """R: layers of the slow residual that the accelerated one covers in one of its own, whole or not; small rates look
    less far ahead, and predict better. None is no accelerated residual: forecast and early routers work alone."""
    rank: int = 8
    """Rank of the query and output deltas; 0 leaves the projections as they are."""
    bottleneck: int = 64
    """Width of the silu bottleneck that stands in for the experts."""
    forecast: int = 0
    """Width of the bottleneck of the forecast; 0 is no forecast."""
    leads: tuple[int, ...] = ()
    """Lookahead distances, in layers, for which routers are taught to be asked early; others work untaught."""

    def __post_init__(self) -> None:
        if self.rate is not None and not 1 < self.rate < inf:
            raise ConfigError(f"rate must be above 1, and finite, for experts to be foreseen, found {self.rate}")
        if min(self.rank, self.forecast) < 0 or self.bottleneck < 1:
            raise ConfigError(
                "rank and forecast must be >= 0 and bottleneck >= 1, found "
                f"{self.rank}, {self.forecast} and {self.bottleneck}"
            )
        if self.rate is None and not self.forecast and not self.leads:
            raise ConfigError("foresight without a rate, a forecast and leads sees nothing; give one of them")
        if min(self.leads, default=1) < 1 or len(set(self.leads)) < len(self.leads):
            raise ConfigError(f"leads must be different numbers of layers, at least 1, found {self.leads}")

    def depth(self, num_layers: int) -> int:
        """Return how many layers the accelerated residual goes through: enough to stand for the last."""
        if self.rate is None:
            return 0
        return next(depth for depth in range(num_layers) if ceil(self.rate * (depth + 1)) >= num_layers)

    def targets(self, depth: int, num_layers: int) -> range:
        """Return the layers that p stands for after ``depth`` layers; all of them are still to run."""
        if self.rate is None:
            return range(0)
        first, stop = (ceil(self.rate * each) for each in (depth, depth + 1))
        return range(max(depth + 1, first), min(stop, num_layers))


@dataclass(frozen=True)
class ForesightPlan:
    """How decoding uses the weights."""

    count: int | None = None
    """k', experts that p predicts for each row and layer; None is as many as the router chooses."""
    leads: tuple[int, ...] = ()
    """Lookahead distances, in layers, at which each router is asked about the slow residual, for as many experts as it
    chooses. A later prediction replaces an earlier one: it adds what that missed, and withdraws what that got wrong."""
    at_least: float = 0.7
    """Probability from which an expert of the forecast is prefetched."""

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ConfigError(f"count must be at least 1, found {self.count}")
        if min(self.leads, default=1) < 1:
            raise ConfigError(f"leads must be at least 1 layer, found {self.leads}")
        if not 0 < self.at_least < 1:
            raise ConfigError(f"at_least must be a probability between 0 and 1, found {self.at_least}")


@dataclass(frozen=True)
class ForesightLoss:
    """Weights of the terms of the loss."""

    routing: float = 1.0
    """a_rt, of the divergence between routers and their predictions."""
    alignment: float = 0.1
    """a_al, of the angle between p and the residual that it stands for."""
    forecast: float = 1.0
    """Of the loss of the forecast."""

    def __post_init__(self) -> None:
        weights = self.routing, self.alignment, self.forecast
        if not all(0 <= weight < inf for weight in weights) or sum(weights) == 0:
            found = ", ".join(map(str, weights))
            raise ConfigError(f"loss weights must be finite and >= 0, one of them > 0, found {found}")
