"""Progress of a training run: lines of text, and curves for TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vivace.errors import DependencyError
from vivace.units import format_seconds


@dataclass(frozen=True)
class StepMeans:
    """Means over the steps since the last report."""

    step: int
    """Number of optimiser steps so far."""
    spent: float
    """Share of the budget that is used, 0 to 1."""
    factor: float
    """Factor of the schedule on the learning rates, 0 to 1."""
    elements_per_s: float
    """Batch elements, padding included, that were trained on per second."""
    eta_s: float
    """Estimated seconds until the budget is used."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    unit: str = "tokens"
    """Plural noun for the elements of a batch."""

    def __str__(self) -> str:
        shown = "  ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        return (
            f"step {self.step}  {self.spent:4.0%}  {shown}  rate x{self.factor:.3f}  "
            f"{self.elements_per_s:.0f} {self.unit}/s  {format_seconds(self.eta_s)} left"
        )


class Report(Protocol):
    """Receives the progress of a run."""

    def note(self, text: str) -> None:
        """Receive a sentence, such as the memory that the run needs or the step it resumed from."""
        ...

    def reading(self, reading: StepMeans) -> None:
        """Receive the means over the last steps."""
        ...

    def held_back(self, step: int, metrics: Mapping[str, float], is_best: bool) -> None:
        """Receive the result of an evaluation on the held-back batches."""
        ...


class Lines:
    """Writes one line of text for each event."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def note(self, text: str) -> None:
        """Print the sentence."""
        self._show(text)

    def reading(self, reading: StepMeans) -> None:
        """Print the means over the last steps."""
        self._show(str(reading))

    def held_back(self, step: int, metrics: Mapping[str, float], is_best: bool) -> None:
        """Print the result of an evaluation, marked when it is the best so far."""
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._show(f"step {step}  held back: {shown}{'  best so far' if is_best else ''}")


class Curves:
    """Writes TensorBoard event files and passes everything on to another report."""

    def __init__(self, folder: str | Path, lines: Report) -> None:
        """Open a folder for event files.

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
        """Pass the sentence on; it has no curve."""
        self._lines.note(text)

    def reading(self, reading: StepMeans) -> None:
        """Add a point to each training curve."""
        self._lines.reading(reading)
        speed = {f"{reading.unit}_per_s": reading.elements_per_s}
        for name, value in {**reading.metrics, "rate": reading.factor, **speed}.items():
            self._writer.add_scalar(f"train/{name}", value, reading.step)
        self._writer.flush()

    def held_back(self, step: int, metrics: Mapping[str, float], is_best: bool) -> None:
        """Add a point to each evaluation curve."""
        self._lines.held_back(step, metrics, is_best)
        for name, value in metrics.items():
            self._writer.add_scalar(f"held_back/{name}", value, step)
        self._writer.flush()
