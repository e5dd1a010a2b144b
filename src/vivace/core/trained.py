"""Weights that are trained beside a frozen decoder and stored in a file of their own."""

from __future__ import annotations

from torch import Tensor, nn


class Trained(nn.Module):
    """A module whose state is what the file of a method holds."""

    depth = 1
    """Layers of the frozen decoder that gradients pass through while it is trained."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the named weights as they go into the file, without gradients."""
        return {name: value.detach() for name, value in self.state_dict().items()}
