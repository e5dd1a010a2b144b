"""Next-token cross-entropy on the scored tokens, which trains all weights of a decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vivace.core.layers import FeedForward
from vivace.core.model import Decoder, Layer
from vivace.core.moe import MixtureOfExperts
from vivace.core.step import Step
from vivace.train.data import DecoderObjective, TokenBatch
from vivace.train.distillation import head_in_parts, rows_at_once
from vivace.train.objective import LossPart, LossParts


def next_token_loss(model: Decoder, hidden: Tensor, targets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy and the accuracy of some rows, each divided by ``total``.

    Args:
        model: decoder whose head turns the rows into logits.
        hidden: (n, E) residuals after the last layer.
        targets: (n,) tokens that follow the rows.
        total: number of scored rows in the whole batch, so that the parts of a batch add up to its mean.
    """
    logits = model.head(hidden)
    right = (logits.detach().argmax(-1) == targets).sum() / total
    return F.cross_entropy(logits, targets, reduction="sum") / total, right


class NextToken(DecoderObjective):
    """Trains every parameter of a decoder."""

    def __init__(self, model: Decoder, *, rows: int = 1024, recompute: bool = False) -> None:
        """Set what is trained and how much is held in memory.

        Args:
            model: the decoder to train.
            rows: number of positions whose logits are held at once.
            recompute: keep only the input of each layer and compute the rest again in the backward pass.
        """
        self.model = model
        self.rows = rows
        self.recompute = recompute

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return two groups: matrices of the layers for Muon, all other parameters for AdamW.

        A matrix in which several projections are stacked (query, key, value; gate, up) is given with their heights.
        """
        matrices: list[tuple[Tensor, tuple[int, ...]]] = []
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            matrices += matrices_of(layer)
        taken = {id(weight) for weight, _ in matrices}
        others = [p for p in self.model.parameters() if id(p) not in taken]
        return [
            {
                "name": "matrices",
                "method": "muon",
                "params": [weight for weight, _ in matrices],
                "cuts": [cut for _, cut in matrices],
            },
            {"name": "others", "method": "adamw", "params": others},
        ]

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the cross-entropy in parts of ``rows`` positions, then the part that trains the layers."""
        rows, targets = batch.predicting, batch.targets
        top = self.residuals(model, batch)[rows]

        def part_of(h: Tensor, part: slice) -> LossPart:
            loss, right = next_token_loss(model, h, targets[part], len(rows))
            return loss, {"loss": float(loss.detach()), "accuracy": float(right)}

        yield from head_in_parts(top, rows_at_once(self.rows, model.config.vocab_size), part_of)

    def residuals(self, model: Decoder, batch: TokenBatch) -> Tensor:
        """Return the residuals of a batch's tokens after the last layer, (B * T, E), with gradients."""
        step = Step.dense(*batch.tokens.shape, device=batch.tokens.device)
        return self._trunk(model, model.embed(batch.tokens.reshape(-1), step), step)

    def _trunk(self, model: Decoder, h: Tensor, step: Step) -> Tensor:
        if not self.recompute or not torch.is_grad_enabled():
            return model.run(h, step)
        for index in range(model.config.num_layers):
            h = self._layer(model, h, step, index)
        return h

    def _layer(self, model: Decoder, h: Tensor, step: Step, index: int) -> Tensor:
        """Run one layer, of which only the input is kept where the rest is computed again."""
        if not self.recompute or not torch.is_grad_enabled():
            return model.run(h, step, index, index + 1)
        h = checkpoint(model.run, h, step, index, index + 1, use_reentrant=False)
        return h


class NextTokenBeside(NextToken):
    """``NextToken`` plus ``weight`` times the mean of a regularisation term over the layers that have one."""

    name: ClassVar[str]
    """Name of the term in reports."""

    def __init__(self, model: Decoder, *, weight: float, rows: int = 1024) -> None:
        """Set what is trained; ``weight`` is the factor on the term, the other arguments are those of ``NextToken``."""
        super().__init__(model, rows=rows)
        self.weight = weight
        self._read = torch.zeros(0, dtype=torch.int64)
        """Rows of a batch that the term is of: those before padding."""
        self._terms: list[Tensor] = []

    def term(self, layer: Layer, u: Tensor) -> Tensor | None:
        """Return a layer's term, (), given the residuals after attention ``u`` (n, E) of the rows before padding; None
        where the layer has none.
        """
        raise NotImplementedError

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the parts of ``NextToken``, with the term added to the last, which trains the layers."""
        self._read = batch.before_padding
        for loss, seen in super().losses(model, batch):
            if seen:
                yield loss, seen
            else:
                mean = torch.stack(self._terms).mean()
                yield loss + self.weight * mean, {self.name: float(mean.detach())}

    def _trunk(self, model: Decoder, h: Tensor, step: Step) -> Tensor:
        self._terms = []
        for layer in model.layers:
            assert isinstance(layer, Layer)
            u = layer.attend(h, step)
            if (term := self.term(layer, u[self._read])) is not None:
                self._terms.append(term)
            h = layer.feed(u, step)
        return h


class BalancedNextToken(NextTokenBeside):
    """``NextToken`` for mixtures of experts, plus a load-balancing term that keeps the experts equally busy.

    The term is ``X sum_e f_e P_e``, with f_e the share of routing choices that fell on expert e and P_e its mean
    probability (Fedus et al. 2022, Switch Transformers, arXiv:2101.03961, equation 4). It is 1 when all experts are
    equally busy.
    """

    name = "uneven"

    def term(self, layer: Layer, u: Tensor) -> Tensor | None:
        """Return the load-balancing term, (), of a layer with experts; None for other layers."""
        if not isinstance(layer.feed_forward, MixtureOfExperts):
            return None
        return _unevenness(layer.route(u), layer.feed_forward.config.top_k)


class SparseNextToken(NextTokenBeside):
    """``NextToken`` for ReLU models, plus a sparsity term that leaves fewer neurons active.

    The term is ``(sum_i a_i)^2 / (F sum_i a_i^2)`` of the F activations of a row, averaged over rows. Whatever the
    scale of the activations, it is 1 when all are equal and 1/F when only one is not zero (Yang et al. 2020, DeepHoyer,
    arXiv:1908.09979, section 3).
    """

    name = "hoyer"

    def term(self, layer: Layer, u: Tensor) -> Tensor | None:
        """Return the sparsity term, (), of a layer's activations."""
        feed = layer.feed_forward
        assert isinstance(feed, FeedForward)
        inner = feed.up(u if layer.ffn_norm is None else layer.ffn_norm(u))
        return _hoyer(F.relu(inner.chunk(2, -1)[0] if feed.gated else inner))


def _unevenness(logits: Tensor, top_k: int) -> Tensor:
    """Return ``X sum_e f_e P_e``, (), of router logits (T, X)."""
    probs = torch.softmax(logits.float(), -1)
    count = probs.shape[1]
    chosen = torch.bincount(probs.topk(top_k, -1)[1].reshape(-1), minlength=count)
    return count * (chosen / chosen.sum() * probs.mean(0)).sum()


def _hoyer(active: Tensor) -> Tensor:
    """Return the mean over rows of ``(sum a)^2 / (F sum a^2)``, (T, F) -> (), for a >= 0; rows of zeros count 0."""
    active = active.float()
    squares = (active * active).sum(-1)
    return (active.sum(-1) ** 2 / (active.shape[-1] * squares.clamp(min=1e-12))).mean()


def matrices_of(layer: Layer) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Return the weight matrices of a layer, each with the heights of the projections that are stacked in it."""
    c = layer.config
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    found = [(layer.qkv.weight, (queries, keys, keys)), (layer.o.weight, (c.width,))]
    feed = layer.feed_forward
    if isinstance(feed, FeedForward):
        halves = (c.ffn_width, c.ffn_width) if c.gated else (c.ffn_width,)
        found += [(feed.up.weight, halves), (feed.down.weight, (c.width,))]
    if layer.cross is not None:
        cross = layer.cross
        found += [(cross.q.weight, (queries,)), (cross.kv.weight, (keys, keys)), (cross.o.weight, (c.width,))]
    assert all(isinstance(weight, Tensor) for weight, _ in found)
    return [(weight, cut) for weight, cut in found if isinstance(weight, Tensor)]
