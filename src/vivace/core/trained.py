"""Weights that are trained beside a frozen decoder and stored in a file of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from vivace.core.model import Decoder


class Trained(nn.Module):
    """A module whose state is what the file of a method holds."""

    depth = 1
    """Layers of the frozen decoder that gradients pass through while it is trained."""

    def start_from(self, model: Decoder) -> None:
        """Copy what training begins with from the frozen decoder; most weights begin with nothing of it."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the named weights as they go into the file, without gradients."""
        return {name: value.detach() for name, value in self.state_dict().items()}
