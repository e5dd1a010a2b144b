"""Training the accelerator on the frozen model, to predict the model's tokens and to arrive at its final residual.

    L = a_kd KL(softmax(z / tau) || softmax(z_p / tau)) tau^2 + a_ce CE(z_p, next token) + a_al (1 - cos(p, h^N))

Here z are the frozen model's logits, z_p those of the shared head on the accelerated residual p at the exit layer, and
h^N is the slow residual after all layers. Only answer positions count: padding and prompts would inflate the agreement.
One frozen pass without gradients gives z, h^N and the keys and values that p reads; p of a position does not depend on
p of another, so all positions train at once. The loss weights are ours (the paper's are not known to us).

The last verified position of each is drawn at random from the ``max_lag`` positions before it, since it lies one to
``max_lag`` tokens back while drafting. ``feedback`` reads its normed final residual, ``reach`` the entries that deep
layers stored up to there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vivace.core.draft_head import DraftHead
from vivace.core.model import Decoder
from vivace.errors import ConfigError
from vivace.methods.multirate.residual import Accelerator
from vivace.train.data import DecoderObjective, TokenBatch
from vivace.train.distillation import AlignedLoss, FrozenPass, head_in_parts, rows_at_once
from vivace.train.objective import LossPart, LossParts

SQUARE_RATE = 0.1
"""Factor on the learning rate of matrices that are as wide as the model. AdamW changes each number by the rate whatever
its gradient, so a row of a wide matrix turns its output by that times the width. At the rate of the low-rank factors
feedback and reach disturb a draft for hundreds of steps: on the shipped model 150 steps with feedback agreed on .45 of
held-back tokens, on .54 and .57 at a fifth and a twentieth of the rate, and with reach on .56 and at a tenth on .58."""


@dataclass(frozen=True)
class MultirateLoss(AlignedLoss):
    """Weights of the three loss terms, and how far back the last verified position may lie."""

    max_lag: int = 8
    """Largest distance to the last verified position for which feedback and reach are trained."""
    rows: int = field(default=2048, kw_only=True)
    """Number of positions whose logits are in memory at once; the loss is summed in parts of this many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_lag < 1:
            raise ConfigError(f"max_lag must be at least 1, found {self.max_lag}")


class MultirateObjective(DecoderObjective):
    """Trains an accelerator; the decoder is not changed."""

    def __init__(self, accelerator: Accelerator, loss: MultirateLoss, head: DraftHead | None = None) -> None:
        """Train ``accelerator`` to guess the tokens that ``head`` reads; None is all of them."""
        self.accelerator = accelerator
        self.loss = loss
        self.head = head

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return all adapter weights, without weight decay; square matrices of feedback and reach learn slower."""
        accelerator = self.accelerator
        square = [p for reach in accelerator.reaches() for p in reach.parameters() if p.dim() == 2]
        square += [] if accelerator.feedback is None else [accelerator.feedback]
        known = {id(p) for p in square}
        others = [p for p in accelerator.parameters() if id(p) not in known]
        groups: list[dict[str, object]] = [{"params": others, "name": "accelerator", "weight_decay": 0.0}]
        if square:
            groups.append({"params": square, "name": "square", "rate": SQUARE_RATE, "weight_decay": 0.0})
        return groups

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the loss in parts of ``rows`` positions that add up to the mean, then the backward pass through the
        adapters.
        """
        rows, targets = batch.predicting, batch.targets
        head = self.head or DraftHead(model)
        frozen = FrozenPass.of(model, batch.tokens)

        def part_of(p: Tensor, part: slice) -> LossPart:
            aim = frozen.final[rows[part]]
            with torch.no_grad():
                truth = head.among(aim)
            loss, sums = self.loss.of_residuals(head.among, p, truth, aim, head.places(targets[part]))
            share = 1 / len(rows)
            return loss * share, {name: float(value.detach()) * share for name, value in sums.items()}

        top = self.accelerate(model, batch.tokens, frozen)[rows]
        yield from head_in_parts(top, rows_at_once(self.loss.rows, head.num_rows), part_of)

    def accelerate(self, model: Decoder, tokens: Tensor, frozen: FrozenPass) -> Tensor:
        """Return the residuals p at the exit layer for every position, (B * T, E)."""
        accelerator, step, count = self.accelerator, frozen.step, frozen.step.num_rows
        deltas = accelerator.deltas(torch.zeros_like(step.slot))
        fed = count if accelerator.config.mode == "delta" else 0
        reading = replace(step, num_write=0, num_feed=fed, deltas=(deltas,))
        last = self._last_verified(tokens)
        p = accelerator.start(frozen.embedded, self._feedback(model, frozen.final, last))
        for reach, start, stop in accelerator.stretches():
            p = p if reach is None else reach.over_text(p, model, step, last)
            p = model.run(p, reading, start, stop)
        return accelerator.at_exit(p)

    def _last_verified(self, tokens: Tensor) -> Tensor:
        """Return a position 1..max_lag tokens before each, drawn at random, -1 before the text, (B, T)."""
        batch, length = tokens.shape
        lag = torch.randint(1, self.loss.max_lag + 1, (batch, length)).to(tokens.device)  # the same on all devices
        return (torch.arange(length, device=tokens.device) - lag).clamp(min=-1)

    def _feedback(self, model: Decoder, final: Tensor, last: Tensor) -> Tensor | None:
        """Return the normed final residual of the last verified position, zeros where there is none."""
        if self.accelerator.feedback is None:
            return None
        batch, length = last.shape
        source = (last.clamp(min=0) + torch.arange(batch, device=last.device)[:, None] * length).reshape(-1)
        with torch.no_grad():
            known = (last >= 0).reshape(-1, 1).to(final.dtype)
            return model.norm(final)[source] * known
