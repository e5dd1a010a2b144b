"""Training streams on the frozen model: each shall say what the model itself will say that much later.

    L = sum_j a_j mean_t CE(s_tj, (1 - m) p_{t+j} + m [x_{t+1+j}]) + CE of the pruner

with p the frozen model's law, s_tj stream j's, [x] all mass on the token x, a_j = decay^(j-1). The paper trains on
tokens (m = 1, equation 5) with a_j = 0.1 beside the main stream's loss; in the lossless mode there is no main loss,
and the law of the model that will verify teaches more than the one token that was drawn from it.

One frozen pass gives what enters the insertion layer and the keys and values above it. Streams of different
positions never meet, so they are trained in chunks of positions, each backed through at once: memory follows the
chunk and not (1 + streams) times the text. Only positions whose next token is scored carry streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.model import Decoder, Layer
from vivace.core.seams import Batch
from vivace.core.step import Step
from vivace.errors import ConfigError
from vivace.multistream.attention import Heads, attend_streams, stream_mask
from vivace.multistream.streams import Streams, known_at


@dataclass(frozen=True)
class MultistreamLoss:
    """Weights of the terms."""

    hard: float = 0.1
    """m: share of the loss on the token itself, the rest is on the model's law."""
    decay: float = 0.9
    """Weight of a stream relative to the one before it."""
    pruner: float = 0.1
    """Weight of the early-exit layer's cross-entropy; its weights share nothing with the streams'."""
    rows: int = 1024
    """Positions whose streams are held at once."""

    def __post_init__(self) -> None:
        if not 0 <= self.hard <= 1 or not 0 < self.decay <= 1 or self.pruner < 0 or self.rows < 1:
            raise ConfigError(
                f"hard must be in [0, 1], decay in (0, 1], pruner >= 0 and rows >= 1, found {self.hard}, {self.decay}, "
                f"{self.pruner} and {self.rows}"
            )


@dataclass(frozen=True)
class Frozen:
    """What the frozen pass left."""

    entering: Tensor
    """(B, T, E) at the insertion layer."""
    final: Tensor
    """(B, T, E) at the top."""
    memory: Step
    """Keeps keys and values of every layer."""
    known: Tensor | None = None
    """(B, T, 2, E) what ``known_at`` gives at every position, zeros for the token after the last."""


@dataclass(frozen=True)
class Places:
    """Positions that carry streams: (B, P) and which of them are not padding."""

    position: Tensor
    real: Tensor


class OwnRows:
    """Fills ``Memory`` for one layer's projections: keeps what streams would store, for themselves alone."""

    def put(self, layer: int, step: Step, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values (n, K, D)."""
        self.keys, self.values = keys, values

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """What was put last."""
        return self.keys, self.values


class MultistreamObjective:
    """Fills ``Objective``: owns streams, leaves the decoder as it is."""

    def __init__(self, streams: Streams, loss: MultistreamLoss) -> None:
        self.streams = streams
        self.loss = loss

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Embeddings learn faster; no decay anywhere."""
        embeddings = self.streams.embeddings
        others = [p for p in self.streams.parameters() if p is not embeddings]
        return [
            {"params": [embeddings], "name": "embeddings", "rate": 5.0, "weight_decay": 0.0},
            {"params": others, "name": "adapters", "weight_decay": 0.0},
        ]

    def losses(self, model: Decoder, batch: Batch) -> Iterator[tuple[Tensor, Mapping[str, float]]]:
        """The loss in chunks of positions that add up to the mean, then the pruner's."""
        frozen = self._frozen(model, batch.tokens)
        total = len(batch.predicting)
        for places in _chunks(batch.scored, self.loss.rows):
            yield self._chunk(model, batch, frozen, places, total)
        if self.streams.pruner is not None and self.loss.pruner:
            rows = batch.predicting
            logits = model.head(self.streams.pruner(frozen.entering.flatten(0, 1)[rows]))
            loss = F.cross_entropy(logits, batch.targets)
            yield self.loss.pruner * loss, {"pruner": float(loss.detach())}

    def updated(self) -> None:
        """Nothing follows an optimiser step."""

    @torch.no_grad()
    def _frozen(self, model: Decoder, tokens: Tensor) -> Frozen:
        step = Step.dense(*tokens.shape)
        insertion = self.streams.config.insertion
        entering = model.run(model.embed(tokens.reshape(-1), step), step, 0, insertion)
        final = model.run(entering, step, insertion)
        known = None
        if self.streams.config.feedback:
            known = known_in_text(model, tokens, final)
        return Frozen(entering.view(*tokens.shape, -1), final.view(*tokens.shape, -1), step, known)

    def _chunk(
        self, model: Decoder, batch: Batch, frozen: Frozen, places: Places, total: int
    ) -> tuple[Tensor, Mapping[str, float]]:
        """Loss of the streams of some positions, as their share of the batch's mean."""
        hidden = run_streams(model, self.streams, frozen.entering, frozen.memory, places, frozen.known)
        count, length = hidden.shape[1], batch.tokens.shape[1]
        row = places.real.nonzero()[:, :1]
        heard = places.position[places.real][:, None] + torch.arange(1, count + 1)  # whose law a stream shall give
        inside = heard.clamp(max=length - 2)
        scored = batch.scored[row, inside + 1] & (heard < length - 1)
        level = torch.arange(count).expand_as(heard)[scored]
        with torch.no_grad():
            truth = model.head(frozen.final[row, inside][scored])
            wanted = torch.softmax(truth, -1).mul_(1 - self.loss.hard)
            targets = batch.tokens[row, inside + 1][scored]
            wanted.scatter_add_(1, targets[:, None], torch.full((len(targets), 1), self.loss.hard))
        guess = model.head(hidden[scored])
        loss = (self.loss.decay**level * F.cross_entropy(guess, wanted, reduction="none")).sum() / total
        return loss, _agreement(guess.detach(), truth, scored, total)


def known_in_text(model: Decoder, tokens: Tensor, final: Tensor) -> Tensor:
    """What feedback reads at every position, (B, T) and (B * T, E) -> (B, T, 2, E)."""
    decided = model.embed(tokens.reshape(-1), Step.dense(*tokens.shape)).view(*tokens.shape, -1)
    decided = F.pad(decided[:, 1:], (0, 0, 0, 1)).flatten(0, 1)
    return known_at(model, final, decided).view(*tokens.shape, 2, -1)


def run_streams(
    model: Decoder, streams: Streams, entering: Tensor, step: Step, places: Places, known: Tensor | None = None
) -> Tensor:
    """Streams of some positions through the layers from the insertion layer on.

    Args:
        model: the frozen decoder.
        streams: their weights.
        entering: (B, T, E) main stream at the insertion layer.
        step: the dense call that holds the main stream's keys and values.
        places: where streams start, n of them real.
        known: (B, T, 2, E) for streams with feedback.

    Returns:
        (n, streams, E) before the final norm.
    """
    count, config = streams.config.streams, model.config
    position, real = places.position, places.real
    at = torch.arange(len(position))[:, None], position
    h = streams.start(entering[at][real], count, None if known is None else known[at][real]).flatten(0, 1)
    stands = (position[real][:, None] + torch.arange(1, count + 1)).reshape(-1)
    own = OwnRows()
    rows = len(stands)
    which = torch.zeros(rows, dtype=torch.int64)
    call = Step(own, which, stands, stands, stands + 1, None, rows, rows, deltas=(streams.terms(which),))
    windows = {config.window(index) for index in range(streams.config.insertion, config.num_layers)}
    masks = {window: stream_mask(position, count, entering.shape[1], window) for window in windows}

    def spread(heads: Tensor) -> Tensor:
        """(n * streams, heads, D) -> (B, P, streams, heads, D), zeros where nothing is real."""
        wide = heads.new_zeros(*real.shape, count, *heads.shape[1:])
        wide[real] = heads.view(-1, count, *heads.shape[1:])
        return wide

    for index in range(streams.config.insertion, config.num_layers):
        layer = model.layers[index]
        assert isinstance(layer, Layer)
        q = layer.project(h, call)
        heads = Heads(spread(q), spread(own.keys), spread(own.values))
        stored, mask = step.memory.stored(index), masks[config.window(index)]
        read = attend_streams(heads, stored, mask, scale=config.scale, softcap=config.attention_softcap)
        h = layer.feed(layer.output(h, read[real].reshape(rows, -1, config.head_dim), call), call)
    return h.view(-1, count, h.shape[1])


def _chunks(scored: Tensor, rows: int) -> Iterator[Places]:
    """Positions whose next token is scored, row by row from the left, at most about ``rows`` at a time."""
    predicting = F.pad(scored[:, 1:], (0, 1))
    order = predicting.int().argsort(dim=1, descending=True, stable=True)
    longest = int(predicting.sum(1).max())
    width = max(1, rows // len(scored))
    for first in range(0, longest, width):
        position = order[:, first : min(first + width, longest)]
        yield Places(position, predicting.gather(1, position))


def _agreement(guess: Tensor, truth: Tensor, scored: Tensor, total: int) -> dict[str, float]:
    """Share of positions at which each stream names the model's choice, and guesses kept by a chain of them."""
    right = torch.zeros(scored.shape)
    right[scored] = (guess.argmax(-1) == truth.argmax(-1)).float()
    seen = {f"stream {place + 1}": float(share) for place, share in enumerate(right.sum(0) / total)}
    return {**seen, "kept": float(right.cumprod(-1).sum()) / total}
