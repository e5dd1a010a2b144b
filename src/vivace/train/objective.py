"""Next-token cross-entropy on the scored tokens: from scratch, or a full fine-tune."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vivace.core.layers import FeedForward
from vivace.core.model import Decoder, Layer
from vivace.core.moe import MixtureOfExperts
from vivace.core.seams import Batch
from vivace.core.step import Step


class NextToken:
    """Fills ``Objective``: trains every parameter of a decoder."""

    def __init__(self, model: Decoder, *, rows: int = 1024, recompute: bool = False) -> None:
        """Prepare.

        Args:
            model: what is trained.
            rows: positions whose logits are held at once.
            recompute: keep only what enters each layer and compute the rest again on the way back.
        """
        self.model = model
        self.rows = rows
        self.recompute = recompute

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Matrices of the layers, cut where several stand side by side, and everything else."""
        matrices: list[tuple[Tensor, tuple[int, ...]]] = []
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            matrices += _matrices(layer)
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

    def losses(self, model: Decoder, batch: Batch) -> Iterator[tuple[Tensor, Mapping[str, float]]]:
        """Cross-entropy in parts of ``rows`` positions, then the trunk with the gradient they left.

        The head runs on a copy of the top rows that is cut from the graph; each part leaves its gradient
        there and its logits are freed. The last part, a product with that gradient, sends it down the trunk.
        """
        rows, targets = batch.predicting, batch.targets
        step = Step.dense(*batch.tokens.shape)
        top = self._trunk(model, model.embed(batch.tokens.reshape(-1), step), step)[rows]
        learns = torch.is_grad_enabled()
        cut = top.detach().requires_grad_(learns)
        for first in range(0, len(rows), self.rows):
            part = slice(first, first + self.rows)
            logits = model.head(cut[part])
            loss = F.cross_entropy(logits, targets[part], reduction="sum") / len(rows)
            right = (logits.detach().argmax(-1) == targets[part]).sum() / len(rows)
            yield loss, {"loss": float(loss.detach()), "accuracy": float(right)}
        if learns:
            assert cut.grad is not None
            yield (top * cut.grad).sum(), {}

    def updated(self) -> None:
        """Nothing follows an optimiser step."""

    def _trunk(self, model: Decoder, h: Tensor, step: Step) -> Tensor:
        if not self.recompute or not torch.is_grad_enabled():
            return model.run(h, step)
        for index in range(model.config.num_layers):
            h = checkpoint(model.run, h, step, index, index + 1, use_reentrant=False)
        return h


class BalancedNextToken(NextToken):
    """``NextToken`` for mixtures of experts, plus what keeps their experts equally busy.

    The term is ``weight * X sum_e f_e P_e``, averaged over mixtures, with f_e the share of choices that fell on expert
    e and P_e its mean probability (Fedus et al. 2022, Switch Transformers, arXiv:2101.03961, equation 4); it is 1 times
    the weight when all are equally busy.
    """

    def __init__(self, model: Decoder, *, weight: float, rows: int = 1024) -> None:
        """Prepare; other arguments as for ``NextToken``."""
        super().__init__(model, rows=rows)
        self.weight = weight
        self._uneven: list[Tensor] = []

    def losses(self, model: Decoder, batch: Batch) -> Iterator[tuple[Tensor, Mapping[str, float]]]:
        """As ``NextToken``, the balance beside the last part."""
        for loss, seen in super().losses(model, batch):
            if seen:
                yield loss, seen
            else:
                uneven = torch.stack(self._uneven).mean()
                yield loss + self.weight * uneven, {"uneven": float(uneven.detach())}

    def _trunk(self, model: Decoder, h: Tensor, step: Step) -> Tensor:
        self._uneven = []
        for layer in model.layers:
            assert isinstance(layer, Layer)
            u = layer.attend(h, step)
            if isinstance(layer.feed_forward, MixtureOfExperts):
                self._uneven.append(_unevenness(layer.route(u), layer.feed_forward.top_k))
            h = layer.feed(u, step)
        return h


def _unevenness(logits: Tensor, top_k: int) -> Tensor:
    """``X sum_e f_e P_e`` of router logits (T, X)."""
    probs = torch.softmax(logits.float(), -1)
    count = probs.shape[1]
    chosen = torch.bincount(probs.topk(top_k, -1)[1].reshape(-1), minlength=count)
    return count * (chosen / chosen.sum() * probs.mean(0)).sum()


def _matrices(layer: Layer) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Weight matrices of a layer, each with the heights of the projections stacked in it."""
    c = layer.config
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    found = [(layer.qkv.weight, (queries, keys, keys)), (layer.o.weight, (c.width,))]
    feed = layer.feed_forward
    if isinstance(feed, FeedForward):
        halves = (c.ffn_width, c.ffn_width) if c.gated else (c.ffn_width,)
        found += [(feed.up.weight, halves), (feed.down.weight, (c.width,))]
    assert all(isinstance(weight, Tensor) for weight, _ in found)
    return [(weight, cut) for weight, cut in found if isinstance(weight, Tensor)]
