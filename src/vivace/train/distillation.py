"""Learning from a frozen decoder: its pass over a batch, the head in parts, and the losses of a guess.

A method beside a frozen decoder learns to say what the whole decoder would say. With z the frozen decoder's logits, z'
those of the guess and x the token that follows, a guess is compared by

    a_kd tau^2 KL(softmax(z / tau) || softmax(z' / tau)) + a_ce CE(z', x)                  (``DistillationLoss``)
    + a_al (1 - cos(p, h))   where the residual p is to arrive where the residual h is     (``AlignedLoss``)

Distillation is Hinton et al. 2015, arXiv:1503.02531. Logits of all positions are never held at once: the head runs on
copies of the residuals that are cut from the graph (``Cut``), some rows at a time; every part leaves its gradient in
the copies, and one last part sends what gathered there down the trunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.model import Decoder, Layer
from vivace.core.step import Step
from vivace.errors import ConfigError
from vivace.train.data import TokenBatch
from vivace.train.objective import Part, Parts


@dataclass(frozen=True)
class FrozenPass:
    """One pass of the frozen decoder over whole texts, without gradients."""

    step: Step
    """The dense call; it keeps the keys and values of every layer."""
    residuals: Mapping[int, Tensor]
    """(B * T, E) below each layer that was asked for; always of 0, the embeddings, and of L, the top."""
    attended: Mapping[int, Tensor]
    """(n, E) behind the attention half of the layers that were asked for, at some rows."""

    @staticmethod
    @torch.no_grad()
    def of(
        model: Decoder,
        tokens: Tensor,
        depths: Collection[int] = (),
        *,
        attended: Collection[int] = (),
        rows: Tensor | None = None,
    ) -> FrozenPass:
        """Run it.

        Args:
            model: the decoder.
            tokens: (B, T).
            depths: layers below which the residuals are kept.
            attended: layers between whose halves they are kept.
            rows: (n,) rows that are kept there; None keeps all.
        """
        step, count = Step.dense(*tokens.shape), model.config.num_layers
        h = model.embed(tokens.reshape(-1), step)
        residuals, between = {0: h}, dict[int, Tensor]()
        stops = {*depths, *attended, *(layer + 1 for layer in attended), count} - {0}
        for start, stop in pairwise((0, *sorted(stops))):
            if start in attended:
                layer = model.layers[start]
                assert isinstance(layer, Layer)
                u = layer.attend(h, step)
                between[start] = u if rows is None else u[rows]
                h = layer.feed(u, step)
            else:
                h = model.run(h, step, start, stop)
            if stop in depths or stop == count:
                residuals[stop] = h
        return FrozenPass(step, residuals, between)

    @property
    def embedded(self) -> Tensor:
        """What enters the first layer, (B * T, E)."""
        return self.residuals[0]

    @property
    def final(self) -> Tensor:
        """What leaves the last layer, before the final norm, (B * T, E)."""
        return self.residuals[max(self.residuals)]

    @torch.no_grad()
    def logits(self, model: Decoder, rows: Tensor) -> Tensor:
        """Return what the frozen decoder says at some rows (n,), (n, V) float32."""
        return model.head(self.final[rows])


class Cut:
    """Copies of tensors that are cut from the graph and gather the gradients of several parts."""

    def __init__(self, *wholes: Tensor) -> None:
        self.wholes = wholes
        self.copies = tuple(whole.detach().requires_grad_(torch.is_grad_enabled()) for whole in wholes)

    def rest(self) -> Parts:
        """Yield the part that sends what gathered in the copies to what they were cut from; nothing without gradients.

        Copies that no part read pass nothing on.
        """
        if not torch.is_grad_enabled():
            return
        pairs = zip(self.wholes, self.copies, strict=True)
        ends = [(whole * copy.grad).sum() for whole, copy in pairs if copy.grad is not None]
        assert ends, "back every part through before asking for the next"
        yield torch.stack(ends).sum(), {}


def slices(count: int, rows: int) -> Iterator[slice]:
    """Yield slices of at most ``rows`` out of ``count`` rows, at least one."""
    for first in range(0, max(1, count), rows):
        yield slice(first, first + rows)


def head_in_parts(top: Tensor, rows: int, part_of: Callable[[Tensor, slice], Part]) -> Parts:
    """Yield a loss in parts of ``rows`` positions, then what they send down the trunk.

    Args:
        top: (n, E) with gradients.
        rows: positions at once.
        part_of: the loss of some rows of a copy of ``top`` that is cut from the graph, given those and their slice.
    """
    cut = Cut(top)
    for part in slices(len(top), rows):
        yield part_of(cut.copies[0][part], part)
    yield from cut.rest()


def divergence(guess: Tensor, truth: Tensor, temperature: float = 1.0) -> Tensor:
    """Return KL(softmax(truth / tau) || softmax(guess / tau)) summed over rows, (n, V) and (n, V) -> ()."""
    if temperature != 1.0:
        guess, truth = guess / temperature, truth / temperature
    return F.kl_div(F.log_softmax(guess, -1), F.log_softmax(truth, -1), reduction="sum", log_target=True)


class Compared(NamedTuple):
    """Guesses beside what the frozen decoder says, summed over rows."""

    loss: Tensor
    divergence: Tensor
    """The KL term without its weights."""
    agreed: Tensor
    """How many guesses have the frozen decoder's likeliest token as their own."""


@dataclass(frozen=True)
class DistillationLoss:
    """Weights of the terms by which guesses learn."""

    distillation: float = 1.0
    """a_kd."""
    cross_entropy: float = 0.1
    """a_ce."""
    rows: int = field(default=1024, kw_only=True)
    """Positions whose logits are held at once; the loss is summed in parts of this many."""

    def __post_init__(self) -> None:
        if min(self.distillation, self.cross_entropy) < 0:
            raise ConfigError(f"loss weights must be >= 0, found {self.distillation} and {self.cross_entropy}")
        if self.rows < 1:
            raise ConfigError(f"rows must be at least 1, found {self.rows}")

    def of(self, guess: Tensor, truth: Tensor, targets: Tensor, temperature: float = 1.0) -> Compared:
        """Compare guesses with the frozen decoder.

        Args:
            guess: (n, V) logits z' with gradients.
            truth: (n, V) logits z.
            targets: (n,) tokens x.
            temperature: tau.
        """
        kl = divergence(guess, truth, temperature)
        ce = F.cross_entropy(guess, targets, reduction="sum")
        agreed = (guess.detach().argmax(-1) == truth.argmax(-1)).sum()
        return Compared(self.distillation * temperature**2 * kl + self.cross_entropy * ce, kl, agreed)


@dataclass(frozen=True)
class AlignedLoss(DistillationLoss):
    """The same for residuals that have a place to arrive at."""

    alignment: float = 0.1
    """a_al."""
    temperature: float = 1.0
    """tau."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alignment < 0 or self.temperature <= 0:
            raise ConfigError(
                f"alignment must be >= 0 and the temperature > 0, found {self.alignment} and {self.temperature}"
            )

    def of_residuals(
        self, model: Decoder, p: Tensor, truth: Tensor, aim: Tensor, targets: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compare residuals with the frozen decoder.

        Args:
            model: whose head reads them.
            p: (n, E) with gradients.
            truth: (n, V) logits z.
            aim: (n, E) residuals h.
            targets: (n,) tokens x.

        Returns:
            The summed loss, and sums for reports: "kl", "away" (1 - cos) and "agreement".
        """
        compared = self.of(model.head(p), truth, targets, self.temperature)
        away = (1 - F.cosine_similarity(p.float(), aim.float(), dim=-1)).sum()
        sums = {"kl": compared.divergence, "away": away, "agreement": compared.agreed}
        return compared.loss + self.alignment * away, sums


def guess_losses(
    loss: DistillationLoss, model: Decoder, speaker: Decoder, frozen: FrozenPass, batch: TokenBatch, top: Tensor
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
