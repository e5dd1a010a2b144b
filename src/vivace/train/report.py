"""What a run tells while it goes on: lines for people, curves for TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vivace.errors import DependencyError
from vivace.units import format_seconds


@dataclass(frozen=True)
class Reading:
    """Means since the last reading."""

    step: int
    spent: float
    """Share of the budget, 0 to 1."""
    factor: float
    """Of the learning rates."""
    elements_per_s: float
    eta_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    unit: str = "tokens"
    """What the elements of a batch are, as a plural."""

    def __str__(self) -> str:
        shown = "  ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        return (
            f"step {self.step}  {self.spent:4.0%}  {shown}  rate x{self.factor:.3f}  "
            f"{self.elements_per_s:.0f} {self.unit}/s  {format_seconds(self.eta_s)} left"
        )


class Report(Protocol):
    """Hears about a run."""

    def note(self, text: str) -> None:
        """A sentence: what begins, the memory it takes, where it resumed."""
        ...

    def reading(self, reading: Reading) -> None:
        """Training went on."""
        ...

    def held_back(self, step: int, metrics: Mapping[str, float], is_best: bool) -> None:
        """A pass over the held-back rows."""
        ...


class Lines:
    """One line per event, to whatever prints."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def note(self, text: str) -> None:
        """Print it."""
        self._show(text)

    def reading(self, reading: Reading) -> None:
        """Print it."""
        self._show(str(reading))

    def held_back(self, step: int, metrics: Mapping[str, float], is_best: bool) -> None:
        """Print it, marked when it is the best so far."""
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._show(f"step {step}  held back: {shown}{'  best so far' if is_best else ''}")


class Curves:
    """TensorBoard event files beside the lines of another report."""

    def __init__(self, folder: str | Path, lines: Report) -> None:
        """Open a folder of events.

        Raises:
            DependencyError: TensorBoard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as exc:
            raise DependencyError("TensorBoard logs need the extra: pip install 'vivace[train]'") from exc
        self._writer: Any = SummaryWriter(str(folder))
        self._lines = lines

    def note(self, text: str) -> None:
        """Print only."""
        self._lines.note(text)

    def reading(self, reading: Reading) -> None:
        """Add a point to each curve."""
        self._lines.reading(reading)
        speed = {f"{reading.unit}_per_s": reading.elements_per_s}
        for name, value in {**reading.metrics, "rate": reading.factor, **speed}.items():
            self._writer.add_scalar(f"train/{name}", value, reading.step)
        self._writer.flush()

    def held_back(self, step: int, metrics: Mapping[str, float], is_best: bool) -> None:
        """Add a point to each curve."""
        self._lines.held_back(step, metrics, is_best)
        for name, value in metrics.items():
            self._writer.add_scalar(f"held_back/{name}", value, step)
        self._writer.flush()
