"""Training EAGLE's layer on the frozen model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.draft_head import DraftHead
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.errors import ConfigError
from vivace.methods.eagle.drafter import EagleLayer
from vivace.train.data import DecoderObjective, TokenBatch
from vivace.train.distillation import DistillationLoss, FrozenPass, head_in_parts, rows_at_once
from vivace.train.objective import LossPart, LossParts


@dataclass(frozen=True)
class EagleLoss(DistillationLoss):
    """Weights of the loss terms."""

    regression: float = 1.0
    """Weight of the smooth L1 distance between predicted and true features."""
    noise: float = 0.1
    """Largest uniform noise added to features, since predicted features have errors too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.regression, self.noise) < 0:
            raise ConfigError(f"regression and noise must be >= 0, found {self.regression} and {self.noise}")


class EagleObjective(DecoderObjective):
    """Trains a feature drafter on a frozen model."""

    def __init__(self, layer: EagleLayer, loss: EagleLoss, head: DraftHead | None = None) -> None:
        """Train ``layer`` to guess the tokens that ``head`` reads; None is all of them."""
        self.layer = layer
        self.loss = loss
        self.head = head

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return all weights of the layer, without weight decay."""
        return [{"params": self.layer.trainable(), "name": "eagle", "weight_decay": 0.0}]

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the loss in parts: every position predicts its own final residual from its token and the residual
        before it.
        """
        frozen, rows, targets = FrozenPass.of(model, batch.tokens), batch.predicting, batch.targets
        with torch.no_grad():
            x = model.norm(frozen.final)
            before = F.pad(x.view(*batch.tokens.shape, -1)[:, :-1], (0, 0, 1, 0)).reshape_as(x)
            before = before + (torch.rand_like(before) - 0.5) * (2 * self.loss.noise)
        own = Step.dense(*batch.tokens.shape, device=x.device)
        top = self.layer(before, frozen.embedded, own)[rows]
        head = self.head or DraftHead(model)

        def part_of(g: Tensor, part: slice) -> LossPart:
            compared = self.loss.of(head.among(g), frozen.logits(head, rows[part]), head.places(targets[part]))
            aim, width = x[rows[part]].float(), x.shape[1]
            distance = F.smooth_l1_loss(model.norm(g).float(), aim, reduction="sum") / width
            share = 1 / len(rows)
            seen = {"agreement": float(compared.agreed) * share, "distance": float(distance.detach()) * share}
            return (compared.loss + self.loss.regression * distance) * share, seen

        yield from head_in_parts(top, rows_at_once(self.loss.rows, head.num_rows), part_of)
