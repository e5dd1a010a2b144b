"""Training streams on the frozen model: each learns what the model itself predicts that many tokens later.

    L = sum_j a_j mean_t CE(s_tj, (1 - m) p_{t+j} + m [x_{t+1+j}]) + CE of the pruner

Here p is the frozen model's distribution, s_tj that of stream j, [x] has all mass on the token x, and a_j =
decay^(j-1). The paper trains on tokens (m = 1, equation 5) with a_j = 0.1 beside the main stream's loss. In the
lossless mode there is no main loss, and the distribution of the model that will verify teaches more than one token.

One frozen pass gives the residuals entering the insertion layer and the keys and values above it. Streams of different
positions do not interact, so they are trained in chunks of positions with one backward pass each: memory grows with the
chunk, and not with (1 + streams) times the text. Only positions whose next token is scored have streams.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.branches import Heard, Places, branch_call, places_of, run_branches
from vivace.core.draft_head import DraftHead
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.errors import ConfigError
from vivace.methods.multistream.streams import Streams, expected_at, known_at
from vivace.train.data import DecoderObjective, TokenBatch
from vivace.train.distillation import FrozenPass, rows_at_once, slices
from vivace.train.objective import LossPart, LossParts


@dataclass(frozen=True)
class MultistreamLoss:
    """Weights of the loss terms."""

    hard: float = 0.1
    """m: weight of the token itself in the target; the rest is the model's distribution."""
    decay: float = 0.9
    """Weight of a stream relative to the stream before."""
    pruner: float = 0.1
    """Weight of the pruner's cross-entropy; it shares no weights with the streams."""
    rows: int = 1024
    """Number of positions whose streams are in memory at once."""

    def __post_init__(self) -> None:
        if not 0 <= self.hard <= 1 or not 0 < self.decay <= 1 or not 0 <= self.pruner < math.inf or self.rows < 1:
            raise ConfigError(
                f"hard must be in [0, 1], decay in (0, 1], finite pruner >= 0 and rows >= 1, found {self.hard}, "
                f"{self.decay}, {self.pruner} and {self.rows}"
            )


@dataclass(frozen=True)
class MainStream:
    """What streams read of the main stream."""

    entering: Tensor
    """(B, T, E) residuals at the insertion layer."""
    final: Tensor
    """(B, T, E) residuals after the last layer."""
    memory: Step
    """The dense call, which holds keys and values of every layer."""
    known: Tensor | None = None
    """(B, T, 2, E) the result of ``known_at`` at every position, with zeros for the token after the last."""


class MultistreamObjective(DecoderObjective):
    """Trains streams; the decoder is not changed."""

    def __init__(
        self,
        streams: Streams,
        loss: MultistreamLoss,
        head: DraftHead | None = None,
        *,
        attach: Literal["every", "kept"] = "kept",
    ) -> None:
        """Train ``streams`` to guess the tokens that ``head`` reads; None is all of them. The pruner reads all.

        Feedback is what streams will read where they are attached while decoding.
        """
        self.streams = streams
        self.loss = loss
        self.head = head
        self.attach = attach

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return the weights without decay; embeddings have five times the learning rate."""
        embeddings = self.streams.embeddings
        others = [p for p in self.streams.parameters() if p is not embeddings]
        adapters = {"params": others, "name": "adapters", "weight_decay": 0.0}
        if self.streams.rotation is not None:
            return [adapters]
        return [{"params": [embeddings], "name": "embeddings", "rate": 5.0, "weight_decay": 0.0}, adapters]

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the streams' loss in chunks of positions that add up to the mean, then the pruner's."""
        main = self._main_stream(model, batch.tokens)
        total, head = len(batch.predicting), self.head or DraftHead(model)
        for places in places_of(batch.scored, rows_at_once(self.loss.rows, head.num_rows)):
            yield self._chunk(head, batch, main, places, total)
        yield from self._pruned(model, batch, main)

    def _pruned(self, model: Decoder, batch: TokenBatch, main: MainStream) -> LossParts:
        if self.streams.pruner is not None and self.loss.pruner:
            rows, targets = batch.predicting, batch.targets
            entering = main.entering.flatten(0, 1)[rows]
            for part in slices(len(rows), rows_at_once(len(rows), model.config.vocab_size)):
                logits = model.head(self.streams.pruner(entering[part]))
                share = len(logits) / len(rows)
                loss = F.cross_entropy(logits, targets[part]) * share
                right = float((logits.detach().argmax(-1) == targets[part]).float().mean()) * share
                yield self.loss.pruner * loss, {"pruner": float(loss.detach()), "expected": right}

    @torch.no_grad()
    def _main_stream(self, model: Decoder, tokens: Tensor) -> MainStream:
        insertion_layer = self.streams.config.insertion_layer
        frozen = FrozenPass.of(model, tokens, (insertion_layer,))
        entering, final = (h.view(*tokens.shape, -1) for h in (frozen.residuals[insertion_layer], frozen.final))
        known = self._known(model, tokens, entering, frozen.final) if self.streams.config.feedback else None
        return MainStream(entering, final, frozen.step, known)

    @torch.no_grad()
    def _known(self, model: Decoder, tokens: Tensor, entering: Tensor, final: Tensor) -> Tensor:
        """Return what feedback reads where streams are attached while decoding, (B, T, 2, E); ``final`` (B * T, E)."""
        if self.attach == "kept":
            return known_in_text(model, tokens, final)
        return expected_in_text(model, self.streams, entering)

    def _chunk(self, head: DraftHead, batch: TokenBatch, main: MainStream, places: Places, total: int) -> LossPart:
        """Return the loss of the streams of some positions, as their share of the batch's mean."""
        hidden = run_streams(head.model, self.streams, main.entering, main.memory, places, main.known)
        heard = Heard.of(places, hidden.shape[1], batch.scored)
        with torch.no_grad():
            truth = head.among(main.final[heard.text, heard.position])
            wanted = torch.softmax(truth, -1).mul_(1 - self.loss.hard)
            targets = head.places(batch.tokens[heard.text, heard.position + 1])[:, None]
            wanted.scatter_add_(1, targets.clamp(min=0), self.loss.hard * (targets >= 0).to(wanted.dtype))
        guess = head.among(hidden[heard.scored])
        loss = (self.loss.decay**heard.level * F.cross_entropy(guess, wanted, reduction="none")).sum() / total
        return loss, heard.agreement(guess.detach(), truth, total, "stream")


def known_in_text(model: Decoder, tokens: Tensor, final: Tensor) -> Tensor:
    """Return what feedback reads at every position, (B, T) and (B * T, E) -> (B, T, 2, E)."""
    decided = model.embed(tokens.reshape(-1), Step.dense(*tokens.shape, device=tokens.device)).view(*tokens.shape, -1)
    decided = F.pad(decided[:, 1:], (0, 0, 0, 1)).flatten(0, 1)
    return known_at(model, final, decided).view(*tokens.shape, 2, -1)


def expected_in_text(model: Decoder, streams: Streams, entering: Tensor) -> Tensor:
    """Return what feedback reads at every position while it is verified, (B, T, E) -> (B, T, 2, E)."""
    rows, length = entering.flatten(0, 1), entering.shape[1]
    following = torch.arange(1, length + 1, device=rows.device).clamp(max=length - 1).repeat(len(entering))
    dense = Step.dense(1, 1, device=rows.device)
    parts = [
        expected_at(model, streams, rows[part], replace(dense, position=following[part]))
        for part in slices(len(rows), rows_at_once(len(rows), model.config.vocab_size))
    ]
    return torch.cat(parts).view(*entering.shape[:2], 2, -1)


def run_streams(
    model: Decoder, streams: Streams, entering: Tensor, step: Step, places: Places, known: Tensor | None = None
) -> Tensor:
    """Run the streams of some positions from the insertion layer to the last layer.

    Args:
        model: the frozen decoder.
        streams: their weights.
        entering: (B, T, E) main stream at the insertion layer.
        step: the dense call that holds the main stream's keys and values.
        places: positions at which streams start; n of them are real.
        known: (B, T, 2, E) input of streams with feedback.

    Returns:
        (n, streams, E) before the final norm.
    """
    count = streams.config.streams
    at = torch.arange(len(places.position), device=places.position.device)[:, None], places.position
    carrying = None if known is None else known[at][places.real]
    h = streams.start(entering[at][places.real], count, carrying).flatten(0, 1)
    call = branch_call(places, count, streams.deltas)
    return run_branches(model, h, call, step, places, streams.config.insertion_layer)
