"""A system of a benchmark under a name of its own, such as one method in several formats or with several drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vivace.evaluate.benchmark import BenchmarkPrompt, System, Trial


@dataclass(frozen=True)
class Named:
    """A system under a name of its own."""

    name: str
    system: System

    def answer(self, batch: Sequence[BenchmarkPrompt]) -> Trial:
        """Answer one batch with greedy decoding."""
        return self.system.answer(batch)
