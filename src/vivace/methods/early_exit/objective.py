"""Training the adaptation module of an exit on the frozen model by distillation (DEED trains on tokens)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from vivace.core.draft_head import DraftHead
from vivace.core.model import Decoder
from vivace.errors import ConfigError
from vivace.methods.early_exit.drafter import Exit
from vivace.train.data import DecoderObjective, TokenBatch
from vivace.train.distillation import DistillationLoss, FrozenPass, guess_losses
from vivace.train.objective import LossParts


class ExitObjective(DecoderObjective):
    """Trains the adaptation module of an exit of a frozen model."""

    def __init__(self, exit_: Exit, loss: DistillationLoss, head: DraftHead | None = None) -> None:
        """Train the module of ``exit_`` to guess the tokens that ``head`` reads; None is all of them.

        Raises:
            ConfigError: the exit has no module.
        """
        if not exit_.config.bottleneck:
            raise ConfigError("an exit without an adaptation module has nothing to train; set adapter.bottleneck")
        self.exit = exit_
        self.loss = loss
        self.head = head

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return all weights of the module, without weight decay."""
        return [{"params": list(self.exit.parameters()), "name": "exit", "weight_decay": 0.0}]

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the loss of the exit's distribution against the whole model's."""
        exit_layer = self.exit.config.exit_layer
        frozen = FrozenPass.of(model, batch.tokens, (exit_layer - 1,))
        deltas = self.exit.deltas(torch.zeros_like(frozen.step.slot))
        reading = replace(frozen.step, num_write=0, num_feed=frozen.step.num_rows, deltas=(deltas,))
        top = self.exit.at_exit(model.run(frozen.residuals[exit_layer - 1], reading, exit_layer - 1, exit_layer))
        head = self.head or DraftHead(model)
        yield from guess_losses(self.loss, head, head.among, frozen, batch, top)
