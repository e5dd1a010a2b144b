"""Training Medusa's heads on the frozen model: each head learns the model's distribution at the position it guesses
for.

The paper trains on the tokens of texts. Here all drafters are distilled from the frozen model, because a guess is
compared with the model and not with a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vivace.core.draft_head import DraftHead
from vivace.core.model import Decoder
from vivace.errors import ConfigError
from vivace.methods.medusa.drafter import MedusaHeads
from vivace.train.data import DecoderObjective, TokenBatch
from vivace.train.distillation import DistillationLoss, FrozenPass, rows_at_once
from vivace.train.objective import LossParts


@dataclass(frozen=True)
class MedusaLoss(DistillationLoss):
    """Weights of the loss terms."""

    decay: float = 0.8
    """Weight of a head relative to the head before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay must be in (0, 1], found {self.decay}")


class MedusaObjective(DecoderObjective):
    """Trains heads on a frozen model."""

    def __init__(self, heads: MedusaHeads, loss: MedusaLoss, head: DraftHead | None = None) -> None:
        """Train ``heads`` to guess the tokens that ``head`` reads; None is all of them."""
        self.heads = heads
        self.loss = loss
        self.head = head

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return all weights of the heads; output matrices start from the model's own and have a lower
        learning rate.
        """
        groups: list[Mapping[str, object]] = [{"params": [self.heads.mix], "name": "mix", "weight_decay": 0.0}]
        if self.heads.output is not None:
            groups.append({"params": [self.heads.output], "name": "output", "rate": 0.3, "weight_decay": 0.0})
        return groups

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the loss of each head in parts of positions."""
        frozen, rows, targets = FrozenPass.of(model, batch.tokens), batch.predicting, batch.targets
        with torch.no_grad():
            x = model.norm(frozen.final)
        scored = F.pad(batch.scored[:, 1:], (0, 1)).reshape(-1)
        length = batch.tokens.shape[1]
        target_of = torch.zeros(len(scored), dtype=torch.int64, device=scored.device)
        target_of[rows] = targets
        read = self.head or DraftHead(model)
        for head in range(self.heads.config.heads):
            heard = rows + head + 1  # rows whose next token this head guesses
            inside = (rows % length + head + 1 < length) & scored[heard.clamp(max=len(scored) - 1)]
            for part in torch.split(inside.nonzero()[:, 0], rows_at_once(self.loss.rows, read.num_rows)):
                truth = frozen.logits(read, heard[part])
                guess = self.heads.logits(head, x[rows[part]], read)
                compared, share = self.loss.of(guess, truth, read.places(target_of[heard[part]])), 1 / len(rows)
                seen = {f"head {head + 1}": float(compared.agreed) * share}
                yield compared.loss * self.loss.decay**head * share, seen
