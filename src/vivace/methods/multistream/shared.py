"""The shared mode: low-rank deltas on the model itself, used by its main stream and its streams alike.

    L = mean_t CE(M_t, x_{t+1}) + alpha sum_j decay^(j-1) mean_t CE(S_tj, x_{t+1+j})    (arXiv:2402.11131, equation 5)

The next token and the tokens after it are learnt together, so the result is another model: the deltas are added to its
weights (``merge``), its own plain decoding is the reference from then on, and its streams have only their embeddings.
The main stream does not read streams here either.

The main pass runs once, with gradients. Streams and the head read copies of its results that are detached from the
graph, chunk by chunk as in the lossless mode; the last part sends the gradients collected there through the main pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from vivace.core.branches import places_of
from vivace.core.config import ModelConfig
from vivace.core.draft_head import DraftHead
from vivace.core.layers import FeedForward, Linear
from vivace.core.low_rank import PROJECTIONS, LowRank, LowRankDeltas, site_shapes
from vivace.core.model import Decoder, Layer
from vivace.core.step import Step
from vivace.errors import ConfigError, UnsupportedError
from vivace.methods.multistream.config import MultistreamConfig
from vivace.methods.multistream.objective import MainStream, MultistreamLoss, MultistreamObjective
from vivace.methods.multistream.streams import Streams
from vivace.train.data import TokenBatch
from vivace.train.distillation import Cut, rows_at_once, slices
from vivace.train.next_token import next_token_loss
from vivace.train.objective import LossParts


@dataclass(frozen=True)
class SharedLoss:
    """Weights of the loss terms beside the main stream's, which is 1."""

    alpha: float = 0.1
    """Weight of the first stream's loss."""
    decay: float = 1.0
    """Weight of a stream relative to the stream before."""
    pruner: float = 0.1
    """Weight of the pruner's cross-entropy, whose gradient does not reach the model."""
    rows: int = 1024
    """Number of positions whose streams, or logits, are in memory at once."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < math.inf:
            raise ConfigError(f"alpha must be finite and >= 0, found {self.alpha}")
        self.of_streams()

    def of_streams(self) -> MultistreamLoss:
        """Return the loss settings of the streams: tokens as targets, as in the paper, without a teacher's
        distribution.
        """
        return MultistreamLoss(hard=1.0, decay=self.decay, pruner=self.pruner, rows=self.rows)


class SharedStreams(Streams):
    """Streams without adapters of their own, and the low-rank deltas that they share with the main stream."""

    def __init__(self, config: MultistreamConfig, model: ModelConfig, rank: int) -> None:
        """Make untrained streams: small embeddings, and deltas of zero.

        Raises:
            ConfigError: the rank is below 1, or the streams have adapters of their own.
            UnsupportedError: the model is a mixture of experts.
        """
        if rank < 1:
            raise ConfigError(f"rank must be at least 1, found {rank}")
        if config.identifier != "embedding":
            raise ConfigError("in the shared mode streams differ by embeddings; set adapter.identifier to embedding")
        if config.rank or config.bottleneck:
            raise ConfigError(
                "in the shared mode streams carry the model's own deltas; set adapter.rank and "
                f"adapter.bottleneck to 0, found {config.rank} and {config.bottleneck}"
            )
        if model.moe is not None:
            raise UnsupportedError("deltas are shared with dense models only; this one is a mixture of experts")
        super().__init__(config, model)
        self.shared = LowRank(site_shapes(model, range(model.num_layers), dict.fromkeys(PROJECTIONS, rank)))

    def deltas(self, which: Tensor, count: int | None = None) -> LowRankDeltas:
        """Return the deltas of the model's rows; ``which`` (T,) is 0 on every row."""
        return self.shared.deltas(which)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights beside the merged model: embeddings, pruner, feedback."""
        return {name: value for name, value in super().tensors().items() if not name.startswith("shared.")}

    @torch.no_grad()
    def merge(self, model: Decoder) -> None:
        """Add the deltas to the model's weights, ``W += B A``; each sum is rounded once."""
        for (layer, name), down, up in self.shared.items():
            rows = _rows_of(model, layer, name)
            rows.copy_(rows.float() + up[0].float() @ down[0].float())


def _rows_of(model: Decoder, index: int, name: str) -> Tensor:
    """Return the rows of a fused matrix that belong to this projection."""
    config, layer = model.config, model.layers[index]
    assert isinstance(layer, Layer)
    fed = layer.feed_forward
    assert isinstance(fed, FeedForward)
    heads, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    module, first, count = {
        "q": (layer.qkv, 0, heads),
        "k": (layer.qkv, heads, keys),
        "v": (layer.qkv, heads + keys, keys),
        "o": (layer.o, 0, config.width),
        "gate": (fed.up, 0, config.ffn_width),
        "up": (fed.up, config.ffn_width if config.gated else 0, config.ffn_width),
        "down": (fed.down, 0, config.width),
    }[name]
    assert isinstance(module, Linear), "deltas are merged into plain weights"
    return module.weight.data[first : first + count]


class SharedObjective(MultistreamObjective):
    """Trains low-rank deltas of a model together with streams that share them."""

    def __init__(
        self,
        streams: SharedStreams,
        loss: SharedLoss,
        head: DraftHead | None = None,
        *,
        attach: Literal["every", "kept"] = "kept",
    ) -> None:
        """Train ``streams`` to guess the tokens that ``head`` reads; the other arguments are those of
        ``MultistreamObjective``. The main stream learns all tokens.
        """
        super().__init__(streams, loss.of_streams(), head, attach=attach)
        self.alpha = loss.alpha

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the main stream's loss in parts, the streams' in chunks, the pruner's, then the main pass itself."""
        step, entering, final = self._main(model, batch.tokens)
        layers = range(self.streams.config.insertion_layer, model.config.num_layers)
        stored = [step.memory.stored(layer) for layer in layers]
        cut = Cut(*(part for pair in stored for part in pair), entering, final)
        *kept, entering, final = cut.copies
        memory = _Copies({layer: (kept[2 * at], kept[2 * at + 1]) for at, layer in enumerate(layers)})
        main = MainStream(entering, final, replace(step, memory=memory, deltas=()))
        if self.streams.config.feedback:
            main = replace(main, known=self._known(model, batch.tokens, main.entering, main.final.flatten(0, 1)))
        yield from self._next_token(model, batch, main)
        if self.alpha:
            head = self.head or DraftHead(model)
            for places in places_of(batch.scored, rows_at_once(self.loss.rows, head.num_rows)):
                loss, seen = self._chunk(head, batch, main, places, len(batch.predicting))
                yield self.alpha * loss, seen
        yield from self._pruned(model, batch, replace(main, entering=main.entering.detach()))
        yield from cut.rest()

    def _main(self, model: Decoder, tokens: Tensor) -> tuple[Step, Tensor, Tensor]:
        """Run the main pass with the deltas on every row; return its step, and (B, T, E) at the insertion layer and at
        the top.
        """
        step, insertion_layer = Step.dense(*tokens.shape, device=tokens.device), self.streams.config.insertion_layer
        step = replace(step, deltas=(self.streams.deltas(torch.zeros_like(step.slot)),))
        entering = model.run(model.embed(tokens.reshape(-1), step), step, 0, insertion_layer)
        final = model.run(entering, step, insertion_layer)
        return step, entering.view(*tokens.shape, -1), final.view(*tokens.shape, -1)

    def _next_token(self, model: Decoder, batch: TokenBatch, main: MainStream) -> LossParts:
        top, rows, targets = main.final.flatten(0, 1), batch.predicting, batch.targets
        for part in slices(len(rows), rows_at_once(self.loss.rows, model.config.vocab_size)):
            loss, right = next_token_loss(model, top[rows[part]], targets[part], len(rows))
            yield loss, {"main": float(loss.detach()), "accuracy": float(right)}


class _Copies:
    """Implements ``Memory`` for streams: they read keys and values of the main stream, and none are added."""

    def __init__(self, held: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self.held = held

    def put(self, layer: int, step: Step, keys: Tensor, values: Tensor) -> None:
        """Raise an error: streams store nothing here."""
        raise AssertionError("streams keep their own rows")

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, each (B, K, T, D)."""
        return self.held[layer]
