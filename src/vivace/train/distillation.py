"""Distillation from a frozen decoder: its forward pass, the head applied in parts, and the losses of a guess.

A method beside a frozen decoder is trained to predict the tokens that the whole decoder predicts. Let z be the logits
of the frozen decoder, z' those of the guess and x the token that follows in the text. The loss of a guess is

    a_kd tau^2 KL(softmax(z / tau) || softmax(z' / tau)) + a_ce CE(z', x)                  (``DistillationLoss``)
    + a_al (1 - cos(p, h))   for a residual p that should equal the residual h             (``AlignedLoss``)

Source: Hinton et al. 2015, arXiv:1503.02531.

The logits of all positions together would need too much memory, (B * T, V). The head therefore runs on copies of the
residuals that are detached from the graph (``Cut``), some rows at a time. Backpropagating each part leaves its gradient
in the copies; a last part passes the collected gradient on to the layers below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.draft_head import NOT_AMONG, DraftHead
from vivace.core.model import Decoder, Layer
from vivace.core.step import Step
from vivace.errors import ConfigError
from vivace.train.clock import work_seconds
from vivace.train.data import TokenBatch
from vivace.train.memory import LOGITS_AT_ONCE
from vivace.train.objective import LossPart, LossParts


@dataclass(frozen=True)
class FrozenPass:
    """Residuals of one forward pass of the frozen decoder over whole texts, without gradients."""

    step: Step
    """The dense call, whose memory holds the keys and values of every layer."""
    residuals: Mapping[int, Tensor]
    """Residuals (B * T, E) by depth: the number of layers they passed. Depths 0 (embeddings) and L are always there."""
    attended: Mapping[int, Tensor]
    """Residuals (n, E) after the attention half of a layer, by the layer's index, at the rows that were asked for."""

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
        """Run the decoder and keep the residuals that are asked for.

        Inside ``SharedPasses`` a pass that another training has made over the same tokens is taken instead.

        Args:
            model: the frozen decoder.
            tokens: (B, T) token ids.
            depths: depths whose residuals are kept.
            attended: indices of layers whose residuals are kept between attention and feed-forward.
            rows: (n,) rows whose ``attended`` residuals are kept; None keeps all.
        """
        shared = _SHARED.get()
        if shared is not None and not attended:
            return shared.made(model, tokens, depths)
        return FrozenPass._made(model, tokens, depths, attended, rows)

    @staticmethod
    def _made(
        model: Decoder, tokens: Tensor, depths: Collection[int], attended: Collection[int], rows: Tensor | None
    ) -> FrozenPass:
        step, count = Step.dense(*tokens.shape, device=tokens.device), model.config.num_layers
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
        """The input of the first layer, (B * T, E)."""
        return self.residuals[0]

    @property
    def final(self) -> Tensor:
        """The output of the last layer before the final norm, (B * T, E)."""
        return self.residuals[max(self.residuals)]

    @torch.no_grad()
    def logits(self, head: DraftHead, rows: Tensor) -> Tensor:
        """Return the frozen decoder's logits of the tokens that ``head`` reads, (n,) -> (n, ``num_rows``) float32."""
        return head.among(self.final[rows])


class SharedPasses:
    """Trainings beside one frozen decoder that learn from the same batches in turn, which make its pass once for all.

    Used as a context manager around their steps. The pass over the last batch is kept with the residuals that any of
    the trainings has asked for so far; its entries and residuals are read and never written, so each training learns
    what it would learn alone.
    """

    def __init__(self) -> None:
        self.saved_s = 0.0
        """Seconds of work (``work_seconds``) of passes whose results were taken again, counted each time."""
        self._depths: set[int] = set()
        self._last: tuple[Decoder, Tensor, FrozenPass, float] | None = None
        self._entered: Token[SharedPasses | None] | None = None

    def __enter__(self) -> SharedPasses:
        self._entered = _SHARED.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._entered is not None
        _SHARED.reset(self._entered)
        self._last = None

    def made(self, model: Decoder, tokens: Tensor, depths: Collection[int]) -> FrozenPass:
        """Return the pass over tokens, the last one if it was over the same and has what is asked for."""
        if self._last is not None and self._depths.issuperset(depths):
            of, read, frozen, seconds = self._last
            if of is model and read.shape == tokens.shape and torch.equal(read, tokens):
                self.saved_s += seconds
                return frozen
        self._depths.update(depths)
        self._last = None  # before the next pass needs its memory
        began = work_seconds(tokens.device)
        frozen = FrozenPass._made(model, tokens, self._depths, (), None)
        self._last = (model, tokens, frozen, work_seconds(tokens.device) - began)
        return frozen


_SHARED: ContextVar[SharedPasses | None] = ContextVar("shared passes", default=None)


class Cut:
    """Copies of tensors that are detached from the graph and collect the gradients of several parts of a loss."""

    def __init__(self, *wholes: Tensor) -> None:
        self.wholes = wholes
        self.copies = tuple(whole.detach().requires_grad_(torch.is_grad_enabled()) for whole in wholes)

    def rest(self) -> LossParts:
        """Yield one part whose backward pass sends the collected gradients on to the original tensors.

        Its value means nothing; only its gradient does. Nothing is yielded while gradients are disabled. Copies that no
        part used have no gradient and are left out.
        """
        if not torch.is_grad_enabled():
            return
        pairs = zip(self.wholes, self.copies, strict=True)
        ends = [(whole * copy.grad).sum() for whole, copy in pairs if copy.grad is not None]
        assert ends, "back every part through before asking for the next"
        yield torch.stack(ends).sum(), {}


def rows_at_once(rows: int, num_logits: int) -> int:
    """Return how many positions a part of a loss may have: ``rows``, or fewer where each has many logits."""
    return min(rows, max(1, LOGITS_AT_ONCE // num_logits))


def slices(count: int, rows: int) -> Iterator[slice]:
    """Yield consecutive slices of at most ``rows`` out of ``count`` rows; an empty one where ``count`` is 0."""
    for first in range(0, max(1, count), rows):
        yield slice(first, first + rows)


def head_in_parts(top: Tensor, rows: int, part_of: Callable[[Tensor, slice], LossPart]) -> LossParts:
    """Yield a loss in parts of ``rows`` positions each, then the part that passes their gradients on to ``top``.

    Args:
        top: (n, E) residuals with gradients.
        rows: positions whose logits are held at once.
        part_of: returns the loss of some positions, given their residuals (detached from the graph) and their slice.
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
    """The comparison of guesses with the frozen decoder, summed over rows; each field has shape ()."""

    loss: Tensor
    """The weighted loss that is trained on."""
    divergence: Tensor
    """The KL divergence without its weight."""
    agreed: Tensor
    """Number of guesses whose likeliest token is the frozen decoder's."""


@dataclass(frozen=True)
class DistillationLoss:
    """Weights of the terms of the distillation loss (module docstring)."""

    distillation: float = 1.0
    """a_kd, the weight of the KL divergence."""
    cross_entropy: float = 0.1
    """a_ce, the weight of the cross-entropy with the text."""
    rows: int = field(default=1024, kw_only=True)
    """Number of positions whose logits are held at once, fewer for large vocabularies (``rows_at_once``); the loss is
    summed over parts of this size."""

    def __post_init__(self) -> None:
        if not all(0 <= weight < math.inf for weight in (self.distillation, self.cross_entropy)):
            raise ConfigError(
                f"loss weights must be finite and >= 0, found {self.distillation} and {self.cross_entropy}"
            )
        if self.rows < 1:
            raise ConfigError(f"rows must be at least 1, found {self.rows}")

    def of(self, guess: Tensor, truth: Tensor, targets: Tensor, temperature: float = 1.0) -> Compared:
        """Compare the logits of guesses with those of the frozen decoder.

        Args:
            guess: (n, V) logits z' with gradients.
            truth: (n, V) logits z of the frozen decoder.
            targets: (n,) tokens x that follow in the text, ``NOT_AMONG`` where the logits leave them out.
            temperature: tau.
        """
        kl = divergence(guess, truth, temperature)
        ce = F.cross_entropy(guess, targets, reduction="sum", ignore_index=NOT_AMONG)
        agreed = (guess.detach().argmax(-1) == truth.argmax(-1)).sum()
        return Compared(self.distillation * temperature**2 * kl + self.cross_entropy * ce, kl, agreed)


@dataclass(frozen=True)
class AlignedLoss(DistillationLoss):
    """The distillation loss with a cosine term, for guesses whose residual should equal a residual of the decoder."""

    alignment: float = 0.1
    """a_al, the weight of the cosine term."""
    temperature: float = 1.0
    """tau, by which logits are divided before the KL divergence."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alignment < math.inf or not 0 < self.temperature < math.inf:
            raise ConfigError(
                f"alignment must be >= 0, the temperature > 0 and both finite, found {self.alignment} and "
                f"{self.temperature}"
            )

    def of_residuals(
        self, read: Callable[[Tensor], Tensor], p: Tensor, truth: Tensor, aim: Tensor, targets: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compare the residuals of guesses with those of the frozen decoder.

        Args:
            read: head that turns the residuals into logits.
            p: (n, E) residuals of the guesses, with gradients.
            truth: (n, V) logits z of the frozen decoder.
            aim: (n, E) residuals h that ``p`` should equal.
            targets: (n,) tokens x that follow in the text.

        Returns:
            The loss summed over rows, and sums for reports: "kl", "away" (1 - cos) and "agreement".
        """
        compared = self.of(read(p), truth, targets, self.temperature)
        away = (1 - F.cosine_similarity(p.float(), aim.float(), dim=-1)).sum()
        sums = {"kl": compared.divergence, "away": away, "agreement": compared.agreed}
        return compared.loss + self.alignment * away, sums


def guess_losses(
    loss: DistillationLoss,
    head: DraftHead,
    read: Callable[[Tensor], Tensor],
    frozen: FrozenPass,
    batch: TokenBatch,
    top: Tensor,
) -> LossParts:
    """Yield the loss of one guess at every scored position, in parts.

    Args:
        loss: weights of the terms.
        head: reads the frozen decoder's logits of the tokens that may be guessed.
        read: turns residuals of guesses into logits of these tokens.
        frozen: the frozen decoder's pass over the batch.
        batch: the tokens, and which of them are scored.
        top: (B * T, E) residuals of the guesses, with gradients.
    """
    rows, targets = batch.predicting, batch.targets

    def part_of(h: Tensor, part: slice) -> LossPart:
        compared = loss.of(read(h), frozen.logits(head, rows[part]), head.places(targets[part]))
        share = 1 / len(rows)
        return compared.loss * share, {"agreement": float(compared.agreed) * share}

    yield from head_in_parts(top[rows], rows_at_once(loss.rows, head.num_rows), part_of)
