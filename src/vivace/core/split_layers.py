"""Layers in two calls, for callers that work between them: up to the stored keys and values, and what is behind those.

A rank that reads a piece of a prompt waits there for the entries of other pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from vivace.core.step import Step

if TYPE_CHECKING:
    from vivace.core.model import Decoder, Layer


class SplitLayers(Protocol):
    """Runs single layers in two calls, with the bits of one."""

    def covers(self, step: Step) -> bool:
        """Return whether it can run this call."""
        ...

    def project(self, h: Tensor, step: Step, index: int) -> Tensor:
        """Store keys and values of rows (T, E) that enter a layer; return what ``finish`` needs, (T, n)."""
        ...

    def finish(self, h: Tensor, projected: Tensor, step: Step, index: int) -> Tensor:
        """Return the rows (T, E) that leave the layer, from those that entered it and what ``project`` returned."""
        ...


class SplitModules:
    """Implements ``SplitLayers`` for every decoder without an encoder."""

    def __init__(self, decoder: Decoder) -> None:
        """Run the modules of a decoder."""
        self._layers: list[Layer] = list(decoder.layers)  # type: ignore[arg-type]

    def covers(self, step: Step) -> bool:
        """Return True."""
        return True

    def project(self, h: Tensor, step: Step, index: int) -> Tensor:
        """Store keys and values, and return queries (T, H, D)."""
        return self._layers[index].project(h, step)

    def finish(self, h: Tensor, projected: Tensor, step: Step, index: int) -> Tensor:
        """Attend, and compute the feed-forward."""
        layer = self._layers[index]
        return layer.feed(layer.output(h, layer.read(projected, step), step), step)


def split_layers(decoder: Decoder, step: Step) -> SplitLayers:
    """Return what runs the layers of a call in two calls each: a decoder's backend where it can, else its modules."""
    found = decoder.backend.split
    return found if found is not None and found.covers(step) else SplitModules(decoder)
