"""The seam of training: something with parameters and a loss, for any model and any kind of batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from torch import Tensor

M = TypeVar("M")
"""The model that is called: a decoder, an encoder with a decoder, a denoiser."""
B = TypeVar("B")
"""What a batch is."""

Part = tuple[Tensor, Mapping[str, float]]
"""A part of a loss, (), and metrics for reports; metrics of the same name are summed over a batch's parts."""
Parts = Iterator[Part]


class Objective(ABC, Generic[M, B]):
    """Something to train. It owns its parameters; the loop owns everything else.

    An objective that remembers more than its parameters also fills ``Stateful`` (``resume.py``).
    """

    @abstractmethod
    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return the optimiser's groups, ``{"params": [...], "name": str, ...}`` as ``Optimiser`` describes them."""

    @abstractmethod
    def losses(self, model: M, batch: B) -> Parts:
        """Yield the loss of a batch in parts that add up to its mean.

        Each part is backed through before the next is asked for, so memory holds the graph of one part. Without
        gradients the parts are only summed.
        """

    def updated(self) -> None:
        """Hear that the optimiser took a step; for moving averages and schedules."""
