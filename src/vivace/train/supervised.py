"""Training all weights so that the shared head can predict from intermediate layers: LayerSkip and LITE.

* LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710): layer l is dropped with probability ``p (2^{l / (L - 1)} - 1)``,
  and in each batch one random layer has an exit loss besides the loss of the last layer. The paper drops layers for
  each sequence and rotates through the exits; here both are drawn for every batch.
* LITE (Varshney et al. 2023, arXiv:2310.18581): the same exits have a loss in every batch, and no layer is dropped.
"""

from __future__ import annotations

import math
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
from vivace.train.objective import LossParts


@dataclass(frozen=True)
class Supervision:
    """Which layers have an exit loss, and its weight."""

    layers: tuple[int, ...] = ()
    """Number of layers below each exit; when empty, one exit is drawn for every batch."""
    weight: float = 0.3
    """Weight of each exit's loss; the loss of the last layer has weight 1."""
    dropout: float = 0.0
    """p, the probability with which the last layer is dropped."""

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf or not 0 <= self.dropout < 1:
            raise ConfigError(
                f"weight must be finite and >= 0 and dropout in [0, 1), found {self.weight} and {self.dropout}"
            )


class SupervisedObjective(NextToken):
    """``NextToken`` with the same loss at some intermediate layers as well."""

    def __init__(self, model: Decoder, supervision: Supervision, *, rows: int = 1024, recompute: bool = False) -> None:
        """Set what is trained; the arguments are those of ``NextToken`` and the exits.

        Raises:
            ConfigError: an exit does not lie between two layers of the model.
        """
        super().__init__(model, rows=rows, recompute=recompute)
        count = model.config.num_layers
        if any(not 0 < layer < count for layer in supervision.layers):
            raise ConfigError(f"layers {list(supervision.layers)} must lie inside a model of {count}")
        self.supervision = supervision

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the losses of the exits and of the last layer, each in parts, then the part that trains the layers."""
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
        """Return the residuals (B * T, E) at the exits and at the top; layers are dropped only under gradients."""
        step, count = Step.dense(*batch.tokens.shape, device=batch.tokens.device), model.config.num_layers
        h = model.embed(batch.tokens.reshape(-1), step)
        found: dict[int, Tensor] = {}
        drops = self.supervision.dropout if torch.is_grad_enabled() else 0.0
        for layer in range(count):
            chance = drops * (2 ** (layer / max(1, count - 1)) - 1)
            if not chance or float(torch.rand(())) >= chance:
                h = self._layer(model, h, step, layer)
            if layer + 1 in exits or layer + 1 == count:
                found[layer + 1] = h
        return found
