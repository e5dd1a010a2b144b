"""Training the low-rank deltas with which the frozen model drafts a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vivace.core.branches import Heard, Places, branch_call, places_of, run_branches
from vivace.core.draft_head import DraftHead
from vivace.core.model import Decoder
from vivace.errors import ConfigError
from vivace.methods.uno.drafter import UnoDeltas
from vivace.train.data import DecoderObjective, TokenBatch
from vivace.train.distillation import DistillationLoss, FrozenPass, rows_at_once
from vivace.train.objective import LossPart, LossParts


@dataclass(frozen=True)
class UnoLoss(DistillationLoss):
    """Weights of the loss terms, and the number of blocks per batch."""

    decay: float = 0.8
    """Weight of a guess relative to the guess before."""
    blocks: int = 256
    """Expected number of positions of a batch that carry a block, drawn at random."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay must be in (0, 1], found {self.decay}")
        if self.blocks < 1:
            raise ConfigError(f"blocks must be at least 1, found {self.blocks}")


class UnoObjective(DecoderObjective):
    """Trains the deltas with which a frozen model drafts a block."""

    def __init__(self, weights: UnoDeltas, loss: UnoLoss, head: DraftHead | None = None) -> None:
        """Train ``weights`` to guess the tokens that ``head`` reads; None is all of them."""
        self.weights = weights
        self.loss = loss
        self.head = head

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return the weights without decay; the noise has five times the learning rate."""
        weights = [*self.weights.down.parameters(), *self.weights.up.parameters()]
        return [
            {"params": [self.weights.noise], "name": "noise", "rate": 5.0, "weight_decay": 0.0},
            {"params": weights, "name": "terms", "weight_decay": 0.0},
        ]

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the loss of noise rows below some positions: their distributions against the model's at the same
        positions.
        """
        frozen = FrozenPass.of(model, batch.tokens)
        teaches = batch.scored & F.pad(batch.scored[:, 1:], (0, 1))  # where a noise row's target is scored
        drawn = torch.rand(teaches.shape).to(teaches.device)  # the same numbers on all devices
        carrying = teaches & (drawn < self.loss.blocks / max(1, int(teaches.sum())))
        carrying = carrying if bool(carrying[:, 1:].any()) else batch.scored
        total, count = int(carrying[:, 1:].sum()), self.weights.config.block - 1
        head = self.head or DraftHead(model)
        for places in places_of(carrying, max(1, rows_at_once(self.loss.rows, head.num_rows) // count)):
            yield self._part(head, batch, frozen, places, total)

    def _part(self, head: DraftHead, batch: TokenBatch, frozen: FrozenPass, places: Places, total: int) -> LossPart:
        model = head.model
        count, length = self.weights.config.block - 1, batch.tokens.shape[1]
        call = branch_call(places, count, self.weights.deltas)
        with torch.no_grad():
            zeros = model.embed(torch.zeros_like(call.slot), call)
        top = run_branches(model, self.weights.disturbed(zeros), call, frozen.step, places)
        heard = Heard.of(places, count, batch.scored)
        truth = frozen.logits(head, heard.text * length + heard.position)
        guess, targets = head.among(top[heard.scored]), head.places(batch.tokens[heard.text, heard.position + 1])
        loss = guess.sum() * 0.0
        for level in range(count):
            rows = heard.level == level
            loss = loss + self.loss.decay**level * self.loss.of(guess[rows], truth[rows], targets[rows]).loss
        return loss / total, heard.agreement(guess.detach(), truth, total, "noise")
