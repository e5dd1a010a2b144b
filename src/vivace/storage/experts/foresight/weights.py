"""The weights of foresight: an accelerated residual that predicts experts, and early routers (M2R2).

Source: Bhendawade et al. 2025, Mixture of Multi-rate Residuals, arXiv:2502.02040.

The accelerated residual p runs no expert (the ``lite`` form of ``methods/multirate``). It covers in one layer what the
slow residual h covers in ``rate`` R > 1: after n layers it stands for the slow residual at layers R n to R n + R, the
last not included, and the frozen routers of those layers are asked about it:

    p^0 = h^0      g_m = Router_m(LN2_m(s_m p^n + t_m h^n)),  n = floor(m / R),  m > n
    predicted at m: the top k' of g_m

A router can also be asked about the slow residual l layers before its own, which it was not trained to read. A matrix
for each such lookahead distance l (``leads`` in the configuration), added to the router's, teaches it what attention
and experts in between will add:

    g_lm = (W_m + V_lm) RMS(h^(m-l)),  and where there are early routers, p's use W_m + V_m too

Predictions only move reads earlier (``drafter.py``); what runs is what the true router chooses. That an accelerated
residual predicts experts is the paper's; the rates, the losses (``objective.py``), the scales s_m and t_m (the slow
residual is there too when p is), the matrices V, and that one p stands for R layers are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.config import ModelConfig
from vivace.core.cpu.packed import NativeNorm, PackedLinear
from vivace.core.layers import RMSNorm
from vivace.core.low_rank import LowRank, site_shapes
from vivace.core.model import Layer
from vivace.core.moe import MixtureOfExperts
from vivace.errors import UnsupportedError
from vivace.storage.experts.foresight.config import ForesightConfig
from vivace.storage.experts.foresight.forecast import Forecast

P_AT_FIRST = 0.25
"""s_m before training, beside t_m = 1: the slow residual alone predicts well a few layers ahead, and p adds to it."""


class Foresight(LowRank):
    """The trained weights of an accelerated residual, of early routers and of a forecast."""

    def __init__(self, config: ForesightConfig, model: ModelConfig) -> None:
        """Make weights that change nothing before they are trained.

        Raises:
            UnsupportedError: the model has no experts.
        """
        if model.moe is None:
            raise UnsupportedError(
                "foresight is for mixtures of experts, and this model has none; `vivace upcycle` makes one"
            )
        ranks = {"q": config.rank, "o": config.rank, "mlp": config.bottleneck}
        super().__init__(site_shapes(model, range(config.depth(model.num_layers)), ranks))
        self.config = config
        self.model = model
        self.scale: nn.Parameter | None = None
        """s_m, (layers, E), applied to p before the norm of the router that is asked; None without a rate."""
        self.slow_scale: nn.Parameter | None = None
        """t_m, (layers, E), applied to the slow residual at p's depth."""
        if config.rate is not None:
            self.scale = nn.Parameter(torch.full((model.num_layers, model.width), P_AT_FIRST))
            self.slow_scale = nn.Parameter(torch.ones(model.num_layers, model.width))
        self.forecast = Forecast(model, config.forecast) if config.forecast else None
        routers = model.num_layers, model.moe.num_experts, model.width
        self.near = nn.Parameter(torch.zeros(len(config.leads), *routers)) if config.leads else None
        """V_lm, (lookahead distances, layers, X, E); None without early routers. The file names it so."""
        self.far = nn.Parameter(torch.zeros(routers)) if config.leads and config.rate is not None else None
        """V_m of p's routers, (layers, X, E). The file names it so."""

    def targets(self, depth: int) -> Iterator[int]:
        """Return the mixtures that p stands for after ``depth`` layers."""
        return filter(self.model.is_moe, self.config.targets(depth, self.model.num_layers))

    def router(self, layer: Layer, lookahead: int | None) -> Tensor:
        """Return the matrix (X, E) of a router for a residual of mean square 1, so many layers early; None is for p."""
        rows = router_rows(layer)
        if lookahead is None:
            return rows if self.far is None else rows + self.far[layer.index]
        if self.near is None or lookahead not in self.config.leads:
            return rows
        return rows + self.near[self.config.leads.index(lookahead), layer.index]

    def scales(self, layers: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return s_m and t_m of n layers, each (n, E)."""
        assert self.scale is not None, "no residual is accelerated without a rate"
        assert self.slow_scale is not None
        which = list(layers)
        return self.scale[which], self.slow_scale[which]

    def at(self, layer: int, p: Tensor, slow: Tensor) -> Tensor:
        """Return what stands for the residual that the router of a layer reads, (T, E); ``slow`` is at p's depth."""
        scale, slow_scale = self.scales([layer])
        return p * scale + slow * slow_scale


def router_rows(layer: Layer) -> Tensor:
    """Return the router of a layer for a residual of mean square 1: (X, E), the norm's weights folded in, float32."""
    mixture, norm = layer.feed_forward, layer.ffn_norm
    assert isinstance(mixture, MixtureOfExperts)
    found = mixture.router
    weight = found.matrix.rows_of_weights() if isinstance(found, PackedLinear) else found.weight
    assert isinstance(weight, Tensor)
    assert norm is None or isinstance(norm, RMSNorm | NativeNorm)
    return weight.float() if norm is None else weight.float() * (norm.weight + norm.offset).float()


def of_mean_square_one(x: Tensor, model: ModelConfig) -> Tensor:
    """Return residuals (..., E) scaled as ``router_rows`` expects them, float32."""
    return x.float() if model.norm_placement == "post" else F.rms_norm(x.float(), x.shape[-1:], eps=model.norm_eps)
