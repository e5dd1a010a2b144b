"""The interface between the training loop and its data: endless batches that can be started at any place.

The loop reads two numbers of a batch (``num_elements`` and ``weight``) and passes the batch to the objective, which
alone depends on its content. The same loop can therefore train on tokens, audio frames or noised images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Countable(Protocol):
    """The two numbers of a batch that the training loop reads."""

    @property
    def num_elements(self) -> int:
        """Number of elements in the batch, padding included; reported speeds count these."""
        ...

    @property
    def weight(self) -> int:
        """Weight of this batch's mean loss in a mean over several batches, such as its number of scored tokens."""
        ...


@dataclass(frozen=True)
class BatchPlace:
    """A position in the training data: the next batch to be read."""

    epoch: int = 0
    index: int = 0
    """Index of the next batch within the epoch."""


B = TypeVar("B", bound=Countable)
BOut = TypeVar("BOut", bound=Countable, covariant=True)


class BatchSource(Protocol[BOut]):
    """Endless batches; the same place always gives the same batch, so a resumed run sees what a killed one would."""

    def start_at(self, place: BatchPlace) -> Iterator[tuple[BatchPlace, BOut]]:
        """Yield the batches from ``place`` on, each together with the place that follows it."""
        ...


@dataclass(frozen=True)
class DataSplit(Generic[B]):
    """Batches to train on, and held-back batches that are only evaluated."""

    train: BatchSource[B]
    held_back: Sequence[B] = ()
    """Batches that select the best parameters by their mean loss; without any, the last parameters are kept."""
    unit: str = "tokens"
    """Plural noun for what ``num_elements`` counts, used in reports."""
