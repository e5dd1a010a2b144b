"""The interface between the training loop and what is trained: parameters with a loss, for any model and batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from torch import Tensor

M = TypeVar("M")
"""Type of the model that the loss calls, such as a decoder, an encoder-decoder or a denoiser."""
B = TypeVar("B")
"""Type of a batch."""

LossPart = tuple[Tensor, Mapping[str, float]]
"""A part of a loss, (), and metrics for reports; metrics of the same name are summed over a batch's parts."""
LossParts = Iterator[LossPart]
"""The parts of a loss; their sum is the mean loss of a batch."""


class Objective(ABC, Generic[M, B]):
    """Parameters to train and the loss to train them by.

    An objective that has state besides its parameters also implements ``Stateful`` (``resume.py``).
    """

    @abstractmethod
    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return parameter groups ``{"params": [...], "name": str, ...}``, as ``Optimiser`` describes them."""

    @abstractmethod
    def losses(self, model: M, batch: B) -> LossParts:
        """Yield the loss of a batch in parts that add up to its mean.

        The loop backpropagates each part before it asks for the next, so memory holds the graph of one part at a time.
        Under ``torch.no_grad`` the parts are only summed.
        """

    def updated(self) -> None:
        """Called after every optimiser step, for moving averages and schedules."""
