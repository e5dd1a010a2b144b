"""Training a small decoder to predict what the frozen model predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vivace.core.draft_head import DraftHead
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.train.data import DecoderObjective, TokenBatch
from vivace.train.distillation import DistillationLoss, FrozenPass, guess_losses
from vivace.train.objective import LossParts


class StudentObjective(DecoderObjective):
    """Trains a small decoder to predict what the frozen model predicts."""

    def __init__(self, student: Decoder, loss: DistillationLoss) -> None:
        self.student = student
        self.loss = loss

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return all weights of the small decoder, without weight decay."""
        return [{"params": list(self.student.parameters()), "name": "student", "weight_decay": 0.0}]

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the loss of the small decoder on the same text, with its own head."""
        step = Step.dense(*batch.tokens.shape, device=batch.tokens.device)
        top = self.student.run(self.student.embed(batch.tokens.reshape(-1), step), step)
        frozen = FrozenPass.of(model, batch.tokens)
        yield from guess_losses(self.loss, DraftHead(model), self.student.head, frozen, batch, top)
