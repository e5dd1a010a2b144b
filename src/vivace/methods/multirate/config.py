"""Settings of an accelerated residual, saved next to its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from vivace.errors import ConfigError


@dataclass(frozen=True)
class MultirateConfig:
    """The exit layer and the adapters below it."""

    RENAMED: ClassVar[Mapping[str, str]] = {"gate": "exit_layer"}
    exit_layer: int = 3
    """Number of layers that the accelerated residual passes; it should then be where the slow one is
    after all of them."""
    mode: Literal["delta", "lite"] = "delta"
    """``delta`` runs the frozen feed-forward for accelerated rows too; ``lite`` only their bottleneck."""
    rank: int = 32
    """Rank of the query and output deltas; 0 has none."""
    bottleneck: int = 256
    """Width of the silu bottleneck beside (``delta``) or instead of (``lite``) the feed-forward; 0 has none, and with a
    rank of 0 and no feedback nor reach the draft is then a plain early exit."""
    feedback: bool = False
    """Whether it starts from the embedding plus a projection of the last verified position's final residual. This is
    ours, not the paper's: it informs the shallow stream of what the whole model computed a few tokens ago."""

    reach: tuple[int, ...] = ()
    """Deep layers whose keys and values of verified positions are read, one before each of the first layers. This is
    ours: it lets a shallow stream copy from the prompt."""

    def __post_init__(self) -> None:
        if self.exit_layer < 1:
            raise ConfigError(f"exit_layer must be at least 1, found {self.exit_layer}")
        if self.mode not in ("delta", "lite"):
            raise ConfigError(f"mode must be delta or lite, found {self.mode!r}")
        if self.rank < 0 or self.bottleneck < (self.mode == "lite"):
            raise ConfigError(
                f"rank must be >= 0 and bottleneck >= 0, in lite >= 1, found {self.rank} and {self.bottleneck}"
            )

        if len(self.reach) > self.exit_layer or min(self.reach, default=0) < 0:
            raise ConfigError(
                f"reach names at most one layer of the model for each of the {self.exit_layer} layers below the exit "
                f"layer, found {list(self.reach)}"
            )

    def check_fits(self, num_layers: int) -> None:
        """Raise an error for an exit layer, or a deep layer to read, that is not inside the model."""
        if self.exit_layer >= num_layers:
            raise ConfigError(f"exit_layer {self.exit_layer} must lie below the top of a model of {num_layers} layers")
        if max(self.reach, default=0) >= num_layers:
            raise ConfigError(f"reach {list(self.reach)} names a layer beyond the model's {num_layers}")
