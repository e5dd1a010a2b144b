"""Training the rivals that draft, on the frozen model: say what the whole model would say.

All share the loss of ``train/distillation.py`` for each guess, over answer positions only, with z the frozen model's
logits where the guess will be verified. Distillation instead of the tokens alone is ours for Medusa and DEED (their
papers train on tokens): the guess has to meet the model, not the text, and every method compared here gets the same
teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.baselines.eagle import EagleLayer
from vivace.baselines.exits import Exit
from vivace.baselines.medusa import MedusaHeads
from vivace.baselines.uno import UnoTerms
from vivace.core.branches import Heard, Places, branch_call, places_of, run_branches
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.errors import ConfigError
from vivace.train.data import DecoderObjective, TokenBatch
from vivace.train.distillation import DistillationLoss, FrozenPass, head_in_parts
from vivace.train.objective import Part, Parts


@dataclass(frozen=True)
class RivalLoss(DistillationLoss):
    """Weights of the terms; those of one method are named after it."""

    decay: float = 0.8
    """Medusa and UNO: weight of a guess relative to the one before."""
    blocks: int = 256
    """UNO: positions of a batch that carry a block, drawn at random."""
    regression: float = 1.0
    """EAGLE: weight of the smooth L1 distance between guessed and true features."""
    noise: float = 0.1
    """EAGLE: features are disturbed by up to this much, as guessed ones will be."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.regression, self.noise) < 0 or not 0 < self.decay <= 1:
            raise ConfigError("loss weights and noise must be >= 0 and decay in (0, 1]")
        if self.blocks < 1:
            raise ConfigError(f"blocks must be at least 1, found {self.blocks}")


class MedusaObjective(DecoderObjective):
    """Heads on a frozen model."""

    def __init__(self, heads: MedusaHeads, loss: RivalLoss) -> None:
        self.heads = heads
        self.loss = loss

    def groups(self) -> Sequence[Mapping[str, object]]:
        """All head weights; output matrices start from the model's own and learn more slowly."""
        groups: list[Mapping[str, object]] = [{"params": [self.heads.mix], "name": "mix", "weight_decay": 0.0}]
        if self.heads.output is not None:
            groups.append({"params": [self.heads.output], "name": "output", "rate": 0.3, "weight_decay": 0.0})
        return groups

    def losses(self, model: Decoder, batch: TokenBatch) -> Parts:
        """Heads and stretches of positions apart from one another."""
        frozen, rows, targets = FrozenPass.of(model, batch.tokens), batch.predicting, batch.targets
        with torch.no_grad():
            x = model.norm(frozen.final)
        scored = F.pad(batch.scored[:, 1:], (0, 1)).reshape(-1)
        length = batch.tokens.shape[1]
        target_of = torch.zeros(len(scored), dtype=torch.int64)
        target_of[rows] = targets
        for head in range(self.heads.config.heads):
            heard = rows + head + 1  # whose next token the head guesses
            inside = (rows % length + head + 1 < length) & scored[heard.clamp(max=len(scored) - 1)]
            for part in torch.split(inside.nonzero()[:, 0], self.loss.rows):
                truth = frozen.logits(model, heard[part])
                guess = self.heads.logits(head, x[rows[part]], model)
                compared, share = self.loss.of(guess, truth, target_of[heard[part]]), 1 / len(rows)
                seen = {f"head {head + 1}": float(compared.agreed) * share}
                yield compared.loss * self.loss.decay**head * share, seen


class EagleObjective(DecoderObjective):
    """A feature drafter on a frozen model."""

    def __init__(self, layer: EagleLayer, loss: RivalLoss) -> None:
        self.layer = layer
        self.loss = loss

    def groups(self) -> Sequence[Mapping[str, object]]:
        """All weights of the layer, no decay."""
        return [{"params": self.layer.learnt(), "name": "eagle", "weight_decay": 0.0}]

    def losses(self, model: Decoder, batch: TokenBatch) -> Parts:
        """Every position guesses its own final residual from the one before it and its token."""
        frozen, rows, targets = FrozenPass.of(model, batch.tokens), batch.predicting, batch.targets
        with torch.no_grad():
            x = model.norm(frozen.final)
            before = F.pad(x.view(*batch.tokens.shape, -1)[:, :-1], (0, 0, 1, 0)).reshape_as(x)
            before = before + (torch.rand_like(before) - 0.5) * (2 * self.loss.noise)
        top = self.layer(before, frozen.embedded, Step.dense(*batch.tokens.shape))[rows]

        def part_of(g: Tensor, part: slice) -> Part:
            compared = self.loss.of(model.head(g), frozen.logits(model, rows[part]), targets[part])
            aim, width = x[rows[part]].float(), x.shape[1]
            distance = F.smooth_l1_loss(model.norm(g).float(), aim, reduction="sum") / width
            share = 1 / len(rows)
            seen = {"agreement": float(compared.agreed) * share, "distance": float(distance.detach()) * share}
            return (compared.loss + self.loss.regression * distance) * share, seen

        yield from head_in_parts(top, self.loss.rows, part_of)


class ExitObjective(DecoderObjective):
    """The adaptation module of an exit of a frozen model."""

    def __init__(self, exit_: Exit, loss: RivalLoss) -> None:
        if not exit_.config.bottleneck:
            raise ConfigError("an exit without an adaptation module has nothing to train; set adapter.bottleneck")
        self.exit = exit_
        self.loss = loss

    def groups(self) -> Sequence[Mapping[str, object]]:
        """All weights of the module, no decay."""
        return [{"params": list(self.exit.parameters()), "name": "exit", "weight_decay": 0.0}]

    def losses(self, model: Decoder, batch: TokenBatch) -> Parts:
        """What the exit says against what the top says."""
        gate = self.exit.config.gate
        frozen = FrozenPass.of(model, batch.tokens, (gate - 1,))
        deltas = self.exit.deltas(torch.zeros(frozen.step.num_rows, dtype=torch.int64))
        reading = replace(frozen.step, num_write=0, num_feed=frozen.step.num_rows, deltas=(deltas,))
        top = self.exit.at_gate(model.run(frozen.residuals[gate - 1], reading, gate - 1, gate))
        yield from _agreeing(self.loss, model, model, frozen, batch, top)


class UnoObjective(DecoderObjective):
    """Terms with which a frozen model drafts a block."""

    def __init__(self, terms: UnoTerms, loss: RivalLoss) -> None:
        self.terms = terms
        self.loss = loss

    def groups(self) -> Sequence[Mapping[str, object]]:
        """The noise learns faster; no decay."""
        terms = [*self.terms.down.parameters(), *self.terms.up.parameters()]
        return [
            {"params": [self.terms.noise], "name": "noise", "rate": 5.0, "weight_decay": 0.0},
            {"params": terms, "name": "terms", "weight_decay": 0.0},
        ]

    def losses(self, model: Decoder, batch: TokenBatch) -> Parts:
        """What noise rows below some positions say against what the model says there."""
        frozen = FrozenPass.of(model, batch.tokens)
        teaches = batch.scored & F.pad(batch.scored[:, 1:], (0, 1))  # a noise row there has something to learn
        carrying = teaches & (torch.rand(teaches.shape) < self.loss.blocks / max(1, int(teaches.sum())))
        carrying = carrying if bool(carrying[:, 1:].any()) else batch.scored
        total, count = int(carrying[:, 1:].sum()), self.terms.config.block - 1
        for places in places_of(carrying, max(1, self.loss.rows // count)):
            yield self._part(model, batch, frozen, places, total)

    def _part(self, model: Decoder, batch: TokenBatch, frozen: FrozenPass, places: Places, total: int) -> Part:
        count, length = self.terms.config.block - 1, batch.tokens.shape[1]
        call = branch_call(places, count, self.terms.deltas)
        with torch.no_grad():
            zeros = model.embed(torch.zeros_like(call.slot), call)
        top = run_branches(model, self.terms.disturbed(zeros), call, frozen.step, places)
        heard = Heard.of(places, count, batch.scored)
        truth = frozen.logits(model, heard.text * length + heard.position)
        guess, targets = model.head(top[heard.scored]), batch.tokens[heard.text, heard.position + 1]
        loss = guess.sum() * 0.0
        for level in range(count):
            rows = heard.level == level
            loss = loss + self.loss.decay**level * self.loss.of(guess[rows], truth[rows], targets[rows]).loss
        return loss / total, heard.agreement(guess.detach(), truth, total, "noise")


class StudentObjective(DecoderObjective):
    """A small decoder of its own that shall write what the frozen model writes."""

    def __init__(self, student: Decoder, loss: RivalLoss) -> None:
        self.student = student
        self.loss = loss

    def groups(self) -> Sequence[Mapping[str, object]]:
        """All its weights, no decay."""
        return [{"params": list(self.student.parameters()), "name": "student", "weight_decay": 0.0}]

    def losses(self, model: Decoder, batch: TokenBatch) -> Parts:
        """The student on the same text, through its own head."""
        step = Step.dense(*batch.tokens.shape)
        top = self.student.run(self.student.embed(batch.tokens.reshape(-1), step), step)
        yield from _agreeing(self.loss, model, self.student, FrozenPass.of(model, batch.tokens), batch, top)


def _agreeing(
    loss: RivalLoss, model: Decoder, speaker: Decoder, frozen: FrozenPass, batch: TokenBatch, top: Tensor
) -> Parts:
    """Yield the loss of one guess at every position, in parts.

    Args:
        loss: its weights.
        model: the frozen decoder ...
        speaker: ... and the one whose head reads the guesses.
        frozen: its pass over the batch.
        batch: what is learnt from.
        top: (B * T, E) residuals of the guesses, with gradients.
    """
    rows, targets = batch.predicting, batch.targets

    def part_of(h: Tensor, part: slice) -> Part:
        compared = loss.of(speaker.head(h), frozen.logits(model, rows[part]), targets[part])
        share = 1 / len(rows)
        return compared.loss * share, {"agreement": float(compared.agreed) * share}

    yield from head_in_parts(top[rows], loss.rows, part_of)
