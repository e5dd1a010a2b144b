"""Routers of several layers, asked at once about one residual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vivace.core.config import ModelConfig
from vivace.core.cpu.packed import PackedLinear
from vivace.core.model import Decoder, Layer
from vivace.core.moe import MixtureOfExperts, likeliest
from vivace.kernels import native
from vivace.kernels.native import NativeBody
from vivace.storage.experts.foresight.weights import Foresight, of_mean_square_one


@dataclass(frozen=True, eq=False)
class ExpertRouters:
    """Routers of n layers, asked at once in float32: small products in bfloat16 take PyTorch ten times as long.

    Their logits are those of ``Layer.route`` up to rounding.
    """

    mixtures: tuple[MixtureOfExperts, ...]
    scale: Tensor
    """s_m, (n, 1, E)."""
    slow_scale: Tensor
    """t_m, (n, 1, E)."""
    weight: Tensor
    """(n, E, X), with the weights of the norms folded in."""
    model: ModelConfig
    """Tells how residuals are normed before routers."""
    body: NativeBody | None = None
    """The native kernels that the routers themselves run on; None is PyTorch."""

    counts: tuple[int, ...] = ()
    """Experts that each router is asked for, for every row."""

    @staticmethod
    def of(
        model: Decoder, foresight: Foresight, ahead: Mapping[int, int], early: Sequence[tuple[int, int]]
    ) -> ExpertRouters:
        """Collect the routers of some mixtures of a model, which stays as it is.

        Args:
            model: the decoder.
            foresight: adds matrices to the routers, and weighs p and the slow residual.
            ahead: by layer that is asked about p, for how many experts.
            early: layers that are asked about the slow residual, each with its lookahead distance, for as many experts
                as their routers choose.
        """
        c, mixtures, weights, body = model.config, [], [], None
        assert c.moe is not None
        for index, lookahead in (*((index, None) for index in ahead), *early):
            layer = model.layers[index]
            assert isinstance(layer, Layer)
            assert isinstance(layer.feed_forward, MixtureOfExperts)
            mixtures.append(layer.feed_forward)
            weights.append(foresight.router(layer, lookahead))
            router = layer.feed_forward.router
            body = router.body if isinstance(router, PackedLinear) else None
        weight = torch.stack(weights).detach().float().mT.contiguous()
        scale = torch.zeros(len(weights), 1, c.width, device=weight.device)
        slow_scale = torch.ones_like(scale)
        if ahead:
            scale[: len(ahead)], slow_scale[: len(ahead)] = (each[:, None].float() for each in foresight.scales(ahead))
        counts = tuple(min(count, weight.shape[-1]) for count in (*ahead.values(), *(c.moe.top_k for _ in early)))
        return ExpertRouters(tuple(mixtures), scale, slow_scale, weight, c, body, counts)

    def likeliest(self, p: Tensor, slow: Tensor) -> list[list[int]]:
        """Return for each router the likeliest experts of all rows (T, E) together, the likeliest first."""
        if self.body is not None and len(p) == 1:
            return self.body.likeliest(self._alone, p, slow)
        each = self.logits(p, slow)[:, None]
        return [likeliest(logits, count)[0] for logits, count in zip(each, self.counts, strict=True)]

    @cached_property
    def _alone(self) -> native.Routers:
        """The same routers, laid out for one row on native kernels."""
        return native.Routers(self.scale, self.slow_scale, self.weight, self.counts)

    def logits(self, p: Tensor, slow: Tensor) -> Tensor:
        """Compute the logits (n, T, X) of rows of p and of the slow residual, (T, E) each."""
        x = torch.addcmul(p.float() * self.scale, slow.float(), self.slow_scale)
        return torch.bmm(of_mean_square_one(x, self.model), self.weight)
