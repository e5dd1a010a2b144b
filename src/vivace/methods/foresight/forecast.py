"""What the end of one pass says of the next one's experts; ours, for loading ahead of time (``foresight.py``).

The residual that a token was decided from has gone through all layers, so it knows the text. Together with the token's
embedding it tells most of what the next pass will choose before that begins, of all layers at once, and how soon each
expert will be chosen again, which tells whom to evict:

    x    = [RMS(h^N_t), RMS(e_{t+1})]
    f, g = U silu(D x + b) + c           two numbers for each expert i of each mixture m
    sigmoid(f_mi)                        that it is chosen in pass t + 1
    2^g_mi                               passes from there to the next that chooses it

    L = mean BCE(f, chosen) + mean huber(g, log2 min(passes, FAR))

It costs two small products a token and no row of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vivace.core.config import ModelConfig
from vivace.core.model import Decoder, Layer
from vivace.core.moe import MixtureOfExperts
from vivace.core.seams import Draft

Product = Callable[[Tensor], Tensor]
"""(T, in) -> (T, out)."""

FAR = 64
"""Passes; what is needed later than that is all the same."""


class Forecast(nn.Module):
    """The trained weights."""

    def __init__(self, model: ModelConfig, bottleneck: int) -> None:
        """For a model with experts."""
        super().__init__()
        assert model.moe is not None
        self.shape = 2, sum(map(model.is_moe, range(model.num_layers))), model.moe.num_experts
        self.down = nn.Parameter(torch.empty(bottleneck, 2 * model.width))
        self.up = nn.Parameter(torch.empty(math.prod(self.shape), bottleneck))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        nn.init.kaiming_uniform_(self.up, a=math.sqrt(5))
        self.inner = nn.Parameter(torch.zeros(bottleneck))
        self.outer = nn.Parameter(torch.zeros(math.prod(self.shape)))

    def forward(self, last: Tensor, entering: Tensor) -> tuple[Tensor, Tensor]:
        """F and g, each (T, mixtures, X).

        Args:
            last: (T, E), residuals that came out of the last layer ...
            entering: ... and (T, E), the embeddings of the tokens that follow.
        """
        return self.by(last, entering, partial(F.linear, weight=self.down), partial(F.linear, weight=self.up))

    def by(self, last: Tensor, entering: Tensor, down: Product, up: Product) -> tuple[Tensor, Tensor]:
        """The same with products by the two matrices as somebody else makes them."""
        x = torch.cat([F.rms_norm(each, each.shape[-1:], eps=1e-6) for each in (last, entering)], -1)
        y = up(F.silu(down(x) + self.inner)) + self.outer
        chosen, passes = y.view(-1, *self.shape).unbind(1)
        return chosen, passes


class Forecaster:
    """Tells a model's mixtures before a pass what it will choose, from where the pass before has ended."""

    def __init__(self, forecast: Forecast, at_least: float) -> None:
        """Set how.

        Args:
            forecast: trained on the model.
            at_least: probability from which an expert is expected.
        """
        self._forecast = forecast
        self._least = math.log(at_least / (1 - at_least))
        self._mixtures: tuple[MixtureOfExperts, ...] = ()
        self._products: tuple[Product, Product] | None = None

    def tell(self, model: Decoder, draft: Draft, entering: Tensor, ends: Mapping[int, Tensor]) -> None:
        """Before a pass whose rows (T, E) are about to enter: what the first row of each slot will choose.

        Args:
            model: the decoder.
            draft: its rows.
            entering: their embeddings.
            ends: by slot, where the pass before has come out (E), as far as it is known.
        """
        nodes = enumerate(zip(draft.lists.slot, draft.lists.node, strict=True))
        rows = {row: ends[slot] for row, (slot, node) in nodes if node == 0 and slot in ends}
        if not rows:
            return
        if self._products is None:
            down, up = (weight.detach().to(model.dtype) for weight in (self._forecast.down, self._forecast.up))
            self._products = model.backend.projection(down), model.backend.projection(up)
            self._mixtures = tuple(_mixtures(model))
        last = torch.stack(list(rows.values()))
        chosen, passes = self._forecast.by(last, entering[list(rows)], *self._products)
        likely = _above(chosen.amax(0), self._least)
        again = passes.amin(0).float().exp2().tolist()
        for mixture, soon in zip(self._mixtures, again, strict=True):
            mixture.experts.foretell(soon)
        for mixture, experts in zip(self._mixtures, likely, strict=True):
            if experts:
                mixture.experts.expect(experts)


def _above(logits: Tensor, least: float) -> list[list[int]]:
    """The experts (mixtures, X) above a logit, the likeliest first, for each mixture."""
    order = logits.argsort(dim=-1, descending=True).tolist()
    return [experts[:count] for experts, count in zip(order, (logits > least).sum(-1).tolist(), strict=True)]


def _mixtures(model: Decoder) -> Iterator[MixtureOfExperts]:
    """All of a model, in order."""
    for layer in model.layers:
        assert isinstance(layer, Layer)
        if isinstance(layer.feed_forward, MixtureOfExperts):
            yield layer.feed_forward


def forecast_loss(
    forecast: Forecast, last: Tensor, entering: Tensor, chosen: Tensor, top_k: int
) -> tuple[Tensor, float]:
    """The loss of n passes in the order of the texts, and how many of the chosen experts are its top k.

    Args:
        forecast: what learns.
        last: (n, E), residuals that came out of the pass before ...
        entering: ... and (n, E), the embeddings of the tokens that follow.
        chosen: (n, mixtures, X) bool, by those tokens' passes.
        top_k: experts that a pass chooses of a mixture.
    """
    f, g = (each.float() for each in forecast(last.float(), entering.float()))
    if not len(chosen):
        return f.sum() + g.sum(), 0.0
    passes = until_next(chosen.flatten(1).cpu().numpy()).reshape(chosen.shape)
    loss = F.binary_cross_entropy_with_logits(f, chosen.float())
    loss = loss + F.smooth_l1_loss(g, torch.from_numpy(np.log2(passes)).to(g.device))
    found = torch.zeros_like(chosen).scatter_(2, f.topk(top_k, -1)[1], value=True)
    return loss, float((found & chosen).sum() / chosen.sum())


def until_next(chosen: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Passes from each of n to the next that chooses, (n, K) -> (n, K), at most ``FAR``.

    The texts of a batch follow one another, the first after the last, as answers to many requests would.
    """
    count = len(chosen)
    out = np.empty(chosen.shape, np.float32)
    ahead = np.full(chosen.shape[1], FAR, np.float32)
    for place in range(count + min(count, FAR) - 1, -1, -1):
        out[place % count] = ahead
        ahead = np.where(chosen[place % count], np.float32(1), np.minimum(ahead + 1, FAR))
    return out
