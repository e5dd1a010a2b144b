"""Weights that are trained beside a frozen decoder and stored in a file of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from vivace.core.model import Decoder


class Trained(nn.Module):
    """A module whose state is saved as the weights of a method."""

    depth = 1
    """Number of layers of the frozen decoder that gradients pass through in training."""

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next(self.parameters()).device

    def start_from(self, model: Decoder) -> None:
        """Initialise weights from the frozen decoder; most modules need nothing of it."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by name, without gradients, as they are saved."""
        return {name: value.detach() for name, value in self.state_dict().items()}
