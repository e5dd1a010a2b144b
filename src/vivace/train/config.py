"""How long to train, how fast, and what to keep."""

from __future__ import annotations

from dataclasses import dataclass

from vivace.errors import ConfigError
from vivace.train.optim import OptimiserConfig


@dataclass(frozen=True)
class LoopConfig:
    """One stretch of training, by steps or by the clock."""

    steps: int | None = None
    """Optimiser steps; a run by steps resumes to the same bits."""
    minutes: float | None = None
    """Wall-clock budget instead; time before an interruption counts."""
    warmup_steps: int = 100
    hold: float = 0.4
    """Share of the budget at full rate; then it falls in a straight line to zero."""
    accumulate: int = 1
    """Batches per optimiser step."""
    clip: float | None = None
    """Largest global gradient norm."""
    autocast: bool = False
    """bfloat16 arithmetic on weights of another dtype."""
    snapshot_s: float = 240.0
    """Seconds between snapshots; 0 takes one after every step."""
    evaluate_steps: int = 500
    """Steps between passes over the held-back rows."""
    report_steps: int = 20

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError("give the budget as steps or as minutes, one of the two")
        if (self.steps is not None and self.steps < 1) or (self.minutes is not None and self.minutes <= 0):
            raise ConfigError(f"the budget must be positive, found {self.steps or self.minutes}")
        if not 0 <= self.hold <= 1:
            raise ConfigError(f"hold is a share between 0 and 1, found {self.hold}")
        counts = {
            "warmup_steps": (self.warmup_steps, 0),
            "accumulate": (self.accumulate, 1),
            "evaluate_steps": (self.evaluate_steps, 1),
            "report_steps": (self.report_steps, 1),
        }
        for name, (value, least) in counts.items():
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, found {value}")
        if self.clip is not None and self.clip <= 0:
            raise ConfigError(f"clip must be positive, found {self.clip}")
        if self.steps is not None and self.warmup_steps > self.steps:
            raise ConfigError(f"{self.warmup_steps} warm-up steps do not fit into {self.steps}; lower warmup_steps")

    def spent(self, step: int, elapsed_s: float) -> float:
        """Share of the budget used before this step, 0 to 1."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        assert self.minutes is not None
        return min(1.0, elapsed_s / (60 * self.minutes))

    def factor(self, step: int, spent: float) -> float:
        """Learning-rate factor of a step, 0 to 1: warm-up, full rate, straight down."""
        warm = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        fall = 1.0 if spent <= self.hold else (1.0 - spent) / (1.0 - self.hold)
        return min(warm, fall)


@dataclass(frozen=True)
class TrainConfig:
    """What a run is asked to do, besides its data."""

    loop: LoopConfig
    optimiser: OptimiserConfig
    seed: int = 0
    plan: str = ""
    """Text that a resumed run must repeat: recipe, base and data."""
