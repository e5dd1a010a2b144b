"""The forecast: predicts the experts of a whole pass from the end of the one before. Ours.

The residual that a token was decided from has gone through all layers. Together with the embedding of that token it
predicts most of what the next pass will choose before that begins, for all layers at once, and in how many passes each
expert will be chosen again, which the cache uses for eviction:

    x    = [RMS(h^N_t), RMS(e_{t+1})]
    f, g = U silu(D x + b) + c           two numbers for each expert i of each mixture m
    sigmoid(f_mi)                        probability that it is chosen in pass t + 1
    2^g_mi                               passes from there to the next that chooses it

    L = mean BCE(f, chosen) + mean huber(g, log2 min(passes, MAX_PASSES))

It costs two small products for each token and no row of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vivace.core.config import ModelConfig

Product = Callable[[Tensor], Tensor]
"""(T, in) -> (T, out)."""

MAX_PASSES = 64
"""An expert that is not used for so many passes counts as used then."""


class Forecast(nn.Module):
    """The trained weights of a forecast."""

    def __init__(self, model: ModelConfig, bottleneck: int) -> None:
        """Make weights for a model with experts, at random."""
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
        """Compute f and g, each (T, mixtures, X).

        Args:
            last: (T, E), residuals after the last layer.
            entering: (T, E), the embeddings of the tokens that were decided from them.
        """
        return self.by(last, entering, partial(F.linear, weight=self.down), partial(F.linear, weight=self.up))

    def by(self, last: Tensor, entering: Tensor, down: Product, up: Product) -> tuple[Tensor, Tensor]:
        """Compute the same with other implementations of the products by ``down`` and ``up``."""
        x = torch.cat([F.rms_norm(each, each.shape[-1:], eps=1e-6) for each in (last, entering)], -1)
        y = up(F.silu(down(x) + self.inner)) + self.outer
        chosen, passes = y.view(-1, *self.shape).unbind(1)
        return chosen, passes


def forecast_loss(
    forecast: Forecast, last: Tensor, entering: Tensor, chosen: Tensor, top_k: int
) -> tuple[Tensor, float]:
    """Compute the loss of n passes in the order of the texts, and the recall of the chosen experts by the top k.

    Args:
        forecast: the weights.
        last: (n, E), residuals after the last layer of the pass before.
        entering: (n, E), the embeddings of the tokens that follow.
        chosen: (n, mixtures, X) bool, the experts that the passes of those tokens choose.
        top_k: experts that a mixture chooses for a token.
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
    """Count the passes from each of n to the next that chooses, (n, K) bool -> (n, K), at most ``MAX_PASSES``.

    The texts of a batch follow one another, and the first follows the last, as answers to many requests would.
    """
    count = len(chosen)
    out = np.empty(chosen.shape, np.float32)
    ahead = np.full(chosen.shape[1], MAX_PASSES, np.float32)
    for place in range(count + min(count, MAX_PASSES) - 1, -1, -1):
        out[place % count] = ahead
        ahead = np.where(chosen[place % count], np.float32(1), np.minimum(ahead + 1, MAX_PASSES))
    return out
