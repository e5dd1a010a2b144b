"""What the loop asks of training data, whatever it is made of: batches that can be had from any place on.

The loop reads two numbers of a batch and hands it on to the objective, which knows what is in it. So tokens, frames of
sound and noised images train alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Countable(Protocol):
    """A batch as the loop sees it."""

    @property
    def num_elements(self) -> int:
        """How much the batch holds, padding included; the speed that is reported counts these."""
        ...

    @property
    def weight(self) -> int:
        """How much the mean over this batch counts in the mean over several, such as its scored tokens."""
        ...


@dataclass(frozen=True)
class Place:
    """Where training stands in its data."""

    epoch: int = 0
    index: int = 0
    """Of the next batch in the epoch."""


B = TypeVar("B", bound=Countable)
BOut = TypeVar("BOut", bound=Countable, covariant=True)


class BatchSource(Protocol[BOut]):
    """Batches without end; the same place always gives the same batch, which is what makes a resumed run exact."""

    def start_at(self, place: Place) -> Iterator[tuple[Place, BOut]]:
        """Yield the batches from a place on, each with the place after it."""
        ...


@dataclass(frozen=True)
class DataSplit(Generic[B]):
    """Batches that are trained on, and batches that only measure."""

    train: BatchSource[B]
    held_back: Sequence[B] = ()
    """The parameters with the smallest mean loss over these are kept; empty keeps the last ones."""
    unit: str = "tokens"
    """What ``num_elements`` counts, as a plural for reports."""
