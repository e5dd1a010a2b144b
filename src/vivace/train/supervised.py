"""Training a whole model so that some of its layers speak through the shared head: LayerSkip and LITE.

* LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710): layer l is dropped with a probability that grows as
  ``p (2^{l / (L - 1)} - 1)``, and one layer a batch, drawn at random, speaks beside the top. The paper drops layers
  sequence by sequence and rotates through the layers; here both are drawn for every batch.
* LITE (Varshney et al. 2023, arXiv:2310.18581): some layers speak beside the top in every batch, nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.errors import ConfigError
from vivace.train.data import TokenBatch
from vivace.train.distillation import Cut, slices
from vivace.train.next_token import NextToken, next_token_loss
from vivace.train.objective import Parts


@dataclass(frozen=True)
class Supervision:
    """Which layers speak beside the top, and how loudly."""

    layers: tuple[int, ...] = ()
    """Layers below each exit; empty draws one for every batch."""
    weight: float = 0.3
    """Of each exit's loss, the top's being 1."""
    dropout: float = 0.0
    """p: probability with which the topmost layer is dropped."""

    def __post_init__(self) -> None:
        if self.weight < 0 or not 0 <= self.dropout < 1:
            raise ConfigError(f"weight must be >= 0 and dropout in [0, 1), found {self.weight} and {self.dropout}")


class SupervisedObjective(NextToken):
    """``NextToken`` at some layers as well as at the top."""

    def __init__(self, model: Decoder, supervision: Supervision, *, rows: int = 1024) -> None:
        """Prepare.

        Raises:
            ConfigError: a layer that is not inside the model.
        """
        super().__init__(model, rows=rows)
        count = model.config.num_layers
        if any(not 0 < layer < count for layer in supervision.layers):
            raise ConfigError(f"layers {list(supervision.layers)} must lie inside a model of {count}")
        self.supervision = supervision

    def losses(self, model: Decoder, batch: TokenBatch) -> Parts:
        """The top's loss and the exits', each in parts; the trunk last, with what all of them left."""
        rows, targets, count = batch.predicting, batch.targets, model.config.num_layers
        residuals = {at: h[rows] for at, h in self._residuals(model, batch, self._exits(count)).items()}
        cut = Cut(*residuals.values())
        for at, h in zip(residuals, cut.copies, strict=True):
            name = "loss" if at == count else f"layer {at}" if self.supervision.layers else "exit"
            weight = 1.0 if name == "loss" else self.supervision.weight
            for part in slices(len(rows), self.rows):
                loss, _ = next_token_loss(model, h[part], targets[part], len(rows))
                yield weight * loss, {name: float(loss.detach())}
        yield from cut.rest()

    def _exits(self, num_layers: int) -> Sequence[int]:
        return self.supervision.layers or (int(torch.randint(1, num_layers, ())),)

    def _residuals(self, model: Decoder, batch: TokenBatch, exits: Sequence[int]) -> dict[int, Tensor]:
        """Below the layers that speak and at the top; some layers are dropped while learning."""
        step, count = Step.dense(*batch.tokens.shape), model.config.num_layers
        h = model.embed(batch.tokens.reshape(-1), step)
        found: dict[int, Tensor] = {}
        drops = self.supervision.dropout if torch.is_grad_enabled() else 0.0
        for layer in range(count):
            chance = drops * (2 ** (layer / max(1, count - 1)) - 1)
            if not chance or float(torch.rand(())) >= chance:
                h = model.run(h, step, layer, layer + 1)
            if layer + 1 in exits or layer + 1 == count:
                found[layer + 1] = h
        return found
