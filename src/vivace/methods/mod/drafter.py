"""Mixture-of-Depths: a router lets only some tokens pass every second layer (Raposo et al. 2024, arXiv:2404.02258).

With h the residual entering a routed layer f, and rms the norm without a gain,

    r = w . rms(h) + b          h <- h + 2 sigma(r) (f(h) - h)  where the token passes,  h  where it does not

In training the tokens with the k largest r of a sequence pass (equation 1), which depends on later tokens. While
decoding a token passes where r exceeds a threshold; r was trained to predict whether it would be among the k (section
3.5).

Where we differ: an untrained router changes nothing (2 sigma(0) = 1), because an existing model is fine-tuned
(``objective.py``); the threshold of each layer is calibrated on held-back text so that the stated share passes; prompts
pass every layer; and a token that skips a layer still stores keys and values there. So the cache has no missing
entries, any method can continue from it, and rows of a batch need not skip together. The price is the projections of a
skipped layer to keys and values, which the layer's fused projection computes together with the queries: 18 % of the
weights of a layer of the shipped model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.cache import KVCache
from vivace.core.config import ModelConfig
from vivace.core.model import Decoder
from vivace.core.seams import Draft, TargetPass
from vivace.core.step import Step
from vivace.core.trained import Trained
from vivace.decode.forward import ForwardPass
from vivace.decode.plain import NoDrafts
from vivace.errors import ConfigError


@dataclass(frozen=True)
class ModConfig:
    """Which layers have a router, and what share of the tokens passes them."""

    every: int = 2
    """The last of every so many layers has a router."""
    capacity: float = 0.5
    """Share of an answer's tokens that pass such a layer."""

    def __post_init__(self) -> None:
        if self.every < 2 or not 0 < self.capacity <= 1:
            raise ConfigError(
                f"every must be at least 2 and capacity in (0, 1], found {self.every} and {self.capacity:g}"
            )

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the indices of the layers with a router.

        Raises:
            ConfigError: the model has no such layer.
        """
        found = tuple(range(self.every - 1, num_layers, self.every))
        if not found:
            raise ConfigError(f"every is {self.every}; a model of {num_layers} layers has no such layer")
        return found


@dataclass(frozen=True)
class ModPlan:
    """The thresholds, saved next to the routers."""

    thresholds: tuple[float, ...]
    """By routed layer: a token passes where r is larger."""


class DepthRouters(Trained):
    """Trained weights: w and b of each routed layer."""

    def __init__(self, config: ModConfig, model: ModelConfig) -> None:
        """Make routers that change nothing."""
        super().__init__()
        self.config = config
        self.layers = config.layers(model.num_layers)
        self.weight = nn.Parameter(torch.zeros(len(self.layers), model.width))
        self.bias = nn.Parameter(torch.zeros(len(self.layers)))

    def logit(self, place: int, h: Tensor) -> Tensor:
        """Return r of the ``place``-th routed layer for residuals (n, E), (n,) float32."""
        x = F.rms_norm(h.float(), h.shape[-1:])
        return (x * self.weight[place].float()).sum(-1) + self.bias[place].float()


def gated(h: Tensor, through: Tensor, r: Tensor) -> Tensor:
    """Return residuals above a routed layer from those below it and the layer's output, both (n, E), and r (n,)."""
    excess = (2 * torch.sigmoid(r) - 1).to(h.dtype)[:, None]
    return through + excess * (through - h)


class RoutedForwardPass:
    """Implements ``Traversal``: each row passes the layers whose routers let it."""

    def __init__(self, routers: DepthRouters, plan: ModPlan) -> None:
        """Route by the plan's thresholds.

        Raises:
            ConfigError: there are thresholds for another number of layers.
        """
        if len(plan.thresholds) != len(routers.layers):
            raise ConfigError(f"{len(plan.thresholds)} thresholds for {len(routers.layers)} routed layers")
        self.routers = routers
        self.plan = plan

    def run(self, model: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> TargetPass:
        """Run the rows through the model, each routed layer in a call of its own."""
        if chunk:
            return ForwardPass().run(model, draft, cache, chunk=True)
        assert draft.is_chain, "a row is routed on the text before it"
        step, below = Step.of(draft, cache), 0
        h = model.embed(draft.tokens, step)
        skipped = torch.zeros(len(h), dtype=torch.int64, device=h.device)
        for place, layer in enumerate(self.routers.layers):
            h = model.run(h, step, below, layer)
            r = self.routers.logit(place, h)
            passes = r > self.plan.thresholds[place]
            h = _through(model, layer, h, step, passes, r)
            skipped += ~passes
            below = layer + 1
        h = model.run(h, step, below)
        depth = model.config.num_layers - skipped
        return TargetPass(h, torch.arange(len(h)), depth, depth)


def _through(model: Decoder, index: int, h: Tensor, step: Step, passes: Tensor, r: Tensor) -> Tensor:
    """Run the rows that pass a layer; before that the others store their keys and values, which those rows may read."""
    if bool(passes.all()):
        return gated(h, model.run(h, step, index, index + 1), r)
    if not bool(passes.any()):
        model.store(h, step, index)
        return h
    rows, others = passes.nonzero()[:, 0], (~passes).nonzero()[:, 0]
    model.store(h[others], step.take(others), index)
    through = model.run(h[rows], step.take(rows), index, index + 1)
    return h.index_copy(0, rows, gated(h[rows], through, r[rows]))


class MixtureOfDepths(NoDrafts):
    """Implements ``Drafter``: drafts nothing and decodes with routed layers."""

    def __init__(self, routers: DepthRouters, plan: ModPlan) -> None:
        super().__init__("mod", RoutedForwardPass(routers, plan))
