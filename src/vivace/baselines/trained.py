"""Weights that go into an adapter's file."""

from __future__ import annotations

from torch import Tensor, nn


class Trained(nn.Module):
    """A rival's trained weights."""

    depth = 1
    """Layers of the base that gradients pass through."""

    def tensors(self) -> dict[str, Tensor]:
        """Named weights for a file."""
        return {name: value.detach() for name, value in self.state_dict().items()}
