"""Settings of a training run: its budget, learning-rate schedule, snapshots and evaluations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from vivace.errors import ConfigError
from vivace.train.optim import OptimiserConfig


@dataclass(frozen=True)
class LoopConfig:
    """Settings of the loop, whose budget is given either in optimiser steps or in minutes."""

    steps: int | None = None
    """Budget in optimiser steps; a run with this kind of budget resumes to the same bits."""
    minutes: float | None = None
    """Budget in minutes instead, including the time before an interruption."""
    clock: Literal["wall", "processor"] = "wall"
    """What minutes are: those of the clock, or those that processors spend on this process. The latter make trainings
    comparable that share a machine with other work."""
    warmup_steps: int = 100
    hold: float = 0.4
    """Share of the budget during which the learning rate stays at its full value; it then falls linearly to zero."""
    accumulate: int = 1
    """Number of batches whose gradients are averaged in one optimiser step."""
    clip: float | None = None
    """Largest global gradient norm; larger gradients are scaled down to it. None does not clip."""
    autocast: bool = False
    """Whether operations run in bfloat16 although the weights have another dtype (``torch.autocast``)."""
    snapshot_s: float = 240.0
    """Seconds between snapshots; 0 writes one after every step."""
    evaluate_steps: int = 500
    """Optimiser steps between evaluations on the held-back batches."""
    report_steps: int = 20
    """Optimiser steps between lines of the report."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError("give the budget as steps or as minutes, one of the two")
        if (self.steps is not None and self.steps < 1) or (
            self.minutes is not None and not 0 < self.minutes < math.inf
        ):
            raise ConfigError(f"the budget must be positive and finite, found {self.steps or self.minutes}")
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
        if self.snapshot_s < 0:
            raise ConfigError(f"snapshot_s must be at least 0, found {self.snapshot_s}")
        if self.steps is not None and self.warmup_steps > self.steps:
            raise ConfigError(f"{self.warmup_steps} warm-up steps do not fit into {self.steps}; lower warmup_steps")

    def spent(self, step: int, elapsed_s: float) -> float:
        """Return the share of the budget that was used before this step, 0 to 1."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        assert self.minutes is not None
        return min(1.0, elapsed_s / (60 * self.minutes))

    def factor(self, step: int, spent: float) -> float:
        """Return the learning-rate factor of a step, 0 to 1: linear warm-up, full rate, linear decay to zero."""
        warm = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        fall = 1.0 if spent <= self.hold else (1.0 - spent) / (1.0 - self.hold)
        return min(warm, fall)


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a training run except its data."""

    loop: LoopConfig
    optimiser: OptimiserConfig
    seed: int = 0
    plan: str = ""
    """Text that describes the recipe, base and data; a resumed run must have the same."""
