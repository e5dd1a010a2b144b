"""Training a LoRA on a frozen decoder: the loss of the answers, with gradients for the factors alone.

Hu et al. 2021, arXiv:2106.09685: down factors begin random and up factors zero, so that training begins with the base.
One that begins with another LoRA, such as the adapter that recovers what a base in few bits has lost, costs no further
bytes when it runs (*Apple Intelligence Foundation Language Models*, 2024, arXiv:2407.21075).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vivace.core.low_rank import LowRank, LowRankDeltas, Shape, Site
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.train.next_token import NextToken


class LoraWeights(LowRank):
    """The factors of one LoRA while they are trained."""

    def __init__(self, shapes: Mapping[Site, Shape], scale: float = 1.0) -> None:
        """Make factors that add nothing yet.

        Args:
            shapes: (in, rank, out) of every site.
            scale: factor on every product of an up factor with its down factor.
        """
        super().__init__(shapes)
        self.scale = scale

    def begin_with(self, factors: Mapping[Site, tuple[Tensor, Tensor]]) -> None:
        """Take the factors of another LoRA, down (rank, in) and up (out, rank), its scale in the up factors."""
        with torch.no_grad():
            for site, down, up in self.items():
                down.copy_(factors[site][0][None])
                up.copy_(factors[site][1][None] / self.scale)

    def deltas(self, which: Tensor) -> LowRankDeltas:
        """Return the factors as data for a call; ``which`` (T,) is 0 on rows that carry them and -1 elsewhere."""
        found = super().deltas(which)
        if self.scale == 1:
            return found
        return replace(found, up={site: up * self.scale for site, up in found.up.items()})

    def factors(self) -> dict[Site, tuple[Tensor, Tensor]]:
        """Return the factors as they are stored: down (rank, in) and up (out, rank), without the scale."""
        return {site: (down.detach()[0], up.detach()[0]) for site, down, up in self.items()}


class LoraObjective(NextToken):
    """The next-token loss of the scored tokens, for the factors of a LoRA that every row carries."""

    def __init__(self, model: Decoder, weights: LoraWeights, *, rows: int = 1024) -> None:
        """Train ``weights`` on a frozen ``model``; ``rows`` positions have their logits held at once."""
        super().__init__(model, rows=rows)
        self.weights = weights

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return the factors, which AdamW trains."""
        return [{"name": "lora", "method": "adamw", "params": list(self.weights.parameters())}]

    def _trunk(self, model: Decoder, h: Tensor, step: Step) -> Tensor:
        return super()._trunk(model, h, replace(step, deltas=(self.weights.deltas(torch.zeros_like(step.slot)),)))
