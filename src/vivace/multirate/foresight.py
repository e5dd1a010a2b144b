"""Experts foreseen by an accelerated residual (M2R2, Bhendawade et al. 2025, arXiv:2502.02040).

The residual p of ``residual.py`` in its ``lite`` form, which runs no expert, covers in one layer what the slow stream
covers in ``rate`` R > 1: after n layers it is to be where the slow residual is at layers R n .. R n + R, the last not
included, and the frozen routers of those layers are asked about it:

    p^0 = h^0      g_m = Router_m(LN2_m(s_m p^n + t_m h^n)),  n = floor(m / R),  m > n
    expected at m: the top k' of g_m

A router reads the residual u_m *after* its layer's attention, so that, and not the layer's input, is what p learns to
be (``ForesightObjective``):

    L = mean over m, t of  a_rt KL(softmax Router_m(LN2_m(u_m)) || softmax g_m) + a_al (1 - cos(p^n, u_m))

The guess only moves loads earlier; what runs is what the true router chooses. That an accelerated residual tells which
experts come is the paper's; its rates, its losses, the scales s_m and t_m (the slow residual is there too when p is)
and that one p speaks for R layers are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ctypes import Array, addressof, c_int64
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.cache import KVCache
from vivace.core.config import ModelConfig
from vivace.core.deltas import Deltas
from vivace.core.layers import RMSNorm
from vivace.core.model import Decoder, Layer
from vivace.core.moe import MixtureOfExperts, likeliest
from vivace.core.packed import NativeNorm, PackedLinear
from vivace.core.seams import Batch, Draft, TargetPass
from vivace.core.step import Step
from vivace.errors import ConfigError, UnsupportedError
from vivace.kernels.library import CRouters
from vivace.kernels.native import NativeBody
from vivace.multirate.forecast import Forecast, Forecaster, forecast_loss
from vivace.multirate.terms import AcceleratorTerms

P_AT_FIRST = 0.25
"""s_m before training, beside t_m = 1: the slow residual's own guess is good a few layers ahead, and p adds to it."""


@dataclass(frozen=True)
class ForesightConfig:
    """How fast the residual is and what it weighs."""

    rate: float | None = 2.0
    """R: layers of the slow stream for one of its own, whole or not; small rates see less far, and better. None is no
    accelerated residual: the forecast and the slow residual speak alone."""
    rank: int = 8
    """Of the query and output deltas; 0 leaves the projections as they are."""
    bottleneck: int = 64
    """Width of the silu bottleneck that stands for the experts."""
    forecast: int = 0
    """Width of the bottleneck that tells a whole pass from the end of the one before; 0 is none."""

    def __post_init__(self) -> None:
        if self.rate is not None and not self.rate > 1:
            raise ConfigError(f"rate must be above 1 for experts to be foreseen, found {self.rate}")
        if min(self.rank, self.forecast) < 0 or self.bottleneck < 1:
            raise ConfigError(
                "rank and forecast must be >= 0 and bottleneck >= 1, found "
                f"{self.rank}, {self.forecast} and {self.bottleneck}"
            )
        if self.rate is None and not self.forecast:
            raise ConfigError("foresight without a rate and without a forecast sees nothing; give one of them")

    def depth(self, num_layers: int) -> int:
        """Layers it goes through: enough to speak for the last."""
        if self.rate is None:
            return 0
        return next(depth for depth in range(num_layers) if ceil(self.rate * (depth + 1)) >= num_layers)

    def targets(self, depth: int, num_layers: int) -> range:
        """Layers that p speaks for after ``depth`` of them; all lie above it."""
        if self.rate is None:
            return range(0)
        first, stop = (ceil(self.rate * each) for each in (depth, depth + 1))
        return range(max(depth + 1, first), min(stop, num_layers))


@dataclass(frozen=True)
class ForesightPlan:
    """How to decode with it."""

    count: int | None = None
    """Experts that p expects for each row and layer, k'; None is as many as the router takes."""
    leads: tuple[int, ...] = ()
    """Ask each router once more so many layers before it runs, about the slow residual, for as many as it takes: what
    was missed may still come, and what was wrong may still be left alone."""
    at_least: float = 0.7
    """Probability from which an expert that is forecast is expected."""

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ConfigError(f"count must be at least 1, found {self.count}")
        if min(self.leads, default=1) < 1:
            raise ConfigError(f"leads must be at least 1 layer, found {self.leads}")
        if not 0 < self.at_least < 1:
            raise ConfigError(f"at_least must be a probability between 0 and 1, found {self.at_least}")


class Foresight(AcceleratorTerms):
    """The trained weights of a residual that runs ahead, and of a forecast."""

    def __init__(self, config: ForesightConfig, model: ModelConfig) -> None:
        """Make zero-initialised adapters.

        Raises:
            UnsupportedError: the model has no experts.
        """
        if model.moe is None:
            raise UnsupportedError(
                "foresight is for mixtures of experts, and this model has none; `vivace upcycle` makes one"
            )
        super().__init__(model, config.depth(model.num_layers), config.rank, config.bottleneck)
        self.config = config
        self.model = model
        self.scale = nn.Parameter(torch.full((model.num_layers, model.width), P_AT_FIRST))
        """s_m, per component, before the norm of the router that is asked."""
        self.slow_scale = nn.Parameter(torch.ones(model.num_layers, model.width))
        """t_m, of the slow residual at p's depth."""
        self.forecast = Forecast(model, config.forecast) if config.forecast else None

    def targets(self, depth: int) -> Iterator[int]:
        """Mixtures that p speaks for after ``depth`` layers."""
        return filter(self.model.is_moe, self.config.targets(depth, self.model.num_layers))

    def at(self, layer: int, p: Tensor, slow: Tensor) -> Tensor:
        """What stands for the residual that the router of a layer will read, (T, E); ``slow`` is at p's depth."""
        return p * self.scale[layer] + slow * self.slow_scale[layer]


class ForesightClimb:
    """Fills ``Traversal``: all rows up the layers, while mixtures are told which experts will be needed."""

    def __init__(self, foresight: Foresight, plan: ForesightPlan) -> None:
        """For weights that were trained on the model, and how they are used."""
        assert foresight.model.moe is not None
        self.foresight = foresight
        self.count = foresight.model.moe.top_k if plan.count is None else plan.count
        self.leads = plan.leads
        self.depth = foresight.config.depth(foresight.model.num_layers)
        self._forecaster = None if foresight.forecast is None else Forecaster(foresight.forecast, plan.at_least)
        self._asked: dict[int, Routers | None] = {}
        """By depth; None where nothing is asked."""
        self._terms: dict[int, Deltas] = {}
        """By rows of a call, so that whoever lays them out does so once."""

    def run(self, model: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> TargetPass:
        """One pass for all slots; prompt chunks, which choose nearly all experts, and late rows go up alone."""
        step = Step.of(draft, cache, chunk=chunk)
        start, rows = draft.entry_layer, torch.arange(len(draft.tokens))
        slow = model.embed(draft.tokens, step) if draft.hidden is None else draft.hidden
        if chunk or start:
            slow = model.run(slow, step, start)
        else:
            if self._forecaster is not None:
                self._forecaster.tell(model, slow, step)
            if self.foresight.config.rate is not None:
                slow = self._ahead(model, slow, step, rows)
            watch = (lambda index, h: self._tell(model, index + 1, h, h)) if self.leads else None
            slow = model.run(slow, step, self.depth, watch=watch)
        if self._forecaster is not None:
            self._forecaster.keep(slow, step)
        return TargetPass(hidden=slow, rows=rows)

    def _ahead(self, model: Decoder, slow: Tensor, step: Step, rows: Tensor) -> Tensor:
        """Both streams as far as the accelerated one goes: slow rows there."""
        count = len(rows)
        if count not in self._terms:
            which = torch.cat((torch.full((count,), -1), torch.zeros(count, dtype=torch.int64)))
            self._terms[count] = self.foresight.terms(which)
        both = step.readers(rows, self._terms[count], fed=False)
        self._tell(model, 0, slow, slow)
        out = model.run(
            torch.cat((slow, slow)),
            both,
            stop=self.depth,
            watch=lambda index, h: self._tell(model, index + 1, h[count:], h[:count]),
        )
        return out[:count]

    def _tell(self, model: Decoder, depth: int, p: Tensor, slow: Tensor) -> None:
        """What p says of later layers, and the slow residual of those that lie a lead ahead."""
        if depth not in self._asked:
            self._asked[depth] = self._routers(model, depth)
        routers = self._asked[depth]
        if routers is not None:
            for mixture, experts in zip(routers.mixtures, routers.likeliest(p, slow), strict=True):
                mixture.experts.expect(experts)

    def _routers(self, model: Decoder, depth: int) -> Routers | None:
        c, count = model.config, self.count
        assert c.moe is not None
        ahead = dict.fromkeys(self.foresight.targets(depth), count)
        by_slow: dict[int, int] = {}
        for layer in (depth + lead for lead in self.leads):
            if depth > 0 and layer < c.num_layers and c.is_moe(layer):
                near = ahead if layer in ahead else by_slow
                near[layer] = max(count, c.moe.top_k)
        return Routers.of(model, ahead, self.foresight, by_slow) if ahead or by_slow else None


@dataclass(frozen=True, eq=False)
class Routers:
    """Routers of n layers asked at once, in float32: small products in bfloat16 take PyTorch ten times as long.

    Their logits are those of ``Layer.route`` but for rounding.
    """

    mixtures: tuple[MixtureOfExperts, ...]
    scale: Tensor
    """s_m, (n, 1, E)."""
    slow_scale: Tensor
    """t_m, (n, 1, E)."""
    weight: Tensor
    """(n, E, X), what the norms multiply by folded in."""
    eps: float | None
    """Of the norm before routers; None where there is none."""
    body: NativeBody | None = None
    """What the routers themselves run on."""

    counts: tuple[int, ...] = ()
    """Experts that each is asked for, for every row."""

    @staticmethod
    def of(model: Decoder, ahead: Mapping[int, int], foresight: Foresight, by_slow: Mapping[int, int]) -> Routers:
        """Those of some mixtures of a model, which stays as it is.

        Args:
            model: whose routers are asked.
            ahead: how many experts each of these layers is asked for about p ...
            foresight: ... and how p and the slow residual are mixed there.
            by_slow: the same of layers that are asked about the slow residual as it stands.
        """
        c, mixtures, weights, body = model.config, [], [], None
        layers = (*ahead, *by_slow)
        for index in layers:
            layer = model.layers[index]
            assert isinstance(layer, Layer)
            assert isinstance(layer.feed_forward, MixtureOfExperts)
            mixtures.append(layer.feed_forward)
            weights.append(_router_rows(layer))
            router = layer.feed_forward.router
            body = router.body if isinstance(router, PackedLinear) else None
        weight = torch.stack(weights).float().mT.contiguous()
        scale, slow_scale = (s[list(layers), None].float() for s in (foresight.scale, foresight.slow_scale))
        scale[len(ahead) :], slow_scale[len(ahead) :] = 0, 1
        eps = None if c.norm_placement == "post" else c.norm_eps
        counts = tuple(min(count, weight.shape[-1]) for count in (*ahead.values(), *by_slow.values()))
        return Routers(tuple(mixtures), scale, slow_scale, weight, eps, body, counts)

    def likeliest(self, p: Tensor, slow: Tensor) -> list[list[int]]:
        """The most likely experts of each row (T, E), together, the likeliest first, for each router."""
        if self.body is not None and len(p) == 1:
            return self._alone(self.body, p, slow)
        each = self.logits(p, slow)[:, None]
        return [likeliest(logits, count)[0] for logits, count in zip(each, self.counts, strict=True)]

    def _alone(self, body: NativeBody, p: Tensor, slow: Tensor) -> list[list[int]]:
        """For one row: the norm is a positive factor there, which changes no order."""
        call, out = self._call
        body.foresee(call, p, slow)
        most = max(self.counts)
        return [out[place * most : place * most + count] for place, count in enumerate(self.counts)]

    @cached_property
    def _call(self) -> tuple[CRouters, Array[c_int64]]:
        """The native call but for its rows, laid out once, and where it writes."""
        num, width, experts = self.weight.shape
        most = max(self.counts)
        out = (c_int64 * (num * most))()
        parts = (each.data_ptr() for each in (self.scale, self.slow_scale, self.weight))
        return CRouters(None, None, *parts, addressof(out), num, width, experts, most), out

    def logits(self, p: Tensor, slow: Tensor) -> Tensor:
        """(T, E) twice -> (n, T, X)."""
        x = torch.addcmul(p.float() * self.scale, slow.float(), self.slow_scale)
        return torch.bmm(x if self.eps is None else F.rms_norm(x, x.shape[-1:], eps=self.eps), self.weight)


def _router_rows(layer: Layer) -> Tensor:
    """The router of a layer (X, E) as it acts on a residual whose mean square is 1."""
    mixture, norm = layer.feed_forward, layer.ffn_norm
    assert isinstance(mixture, MixtureOfExperts)
    found = mixture.router
    weight = found.matrix.rows_of_weights() if isinstance(found, PackedLinear) else found.weight
    assert isinstance(weight, Tensor)
    assert norm is None or isinstance(norm, RMSNorm | NativeNorm)
    return weight if norm is None else weight * (norm.weight + norm.offset)


@dataclass(frozen=True)
class ForesightLoss:
    """Weights of the terms."""

    routing: float = 1.0
    alignment: float = 0.1
    forecast: float = 1.0

    def __post_init__(self) -> None:
        weights = self.routing, self.alignment, self.forecast
        if min(weights) < 0 or sum(weights) == 0:
            raise ConfigError(f"loss weights must be >= 0, one of them > 0, found {', '.join(map(str, weights))}")


class ForesightObjective:
    """Fills ``Objective``: owns a foresight, leaves the decoder as it is."""

    def __init__(self, foresight: Foresight, loss: ForesightLoss) -> None:
        self.foresight = foresight
        self.loss = loss

    def groups(self) -> Sequence[Mapping[str, object]]:
        """All adapter weights, no decay."""
        return [{"params": list(self.foresight.parameters()), "name": "foresight", "weight_decay": 0.0}]

    def losses(self, model: Decoder, batch: Batch) -> Iterator[tuple[Tensor, Mapping[str, float]]]:
        """One loss over all mixtures and answer positions, ready for ``backward``.

        ``recall`` is of the top k by the accelerated residual, ``forecast`` of those that are forecast.
        """
        rows = batch.predicting
        step = Step.dense(*batch.tokens.shape)
        entering, truth = _slow(model, batch.tokens.reshape(-1), step, rows)
        loss, said = entering[0].new_zeros(()), {}
        if self.foresight.config.rate is not None:
            loss, said["recall"] = self._ahead(model, entering, truth, step, rows)
        if self.foresight.forecast is not None:
            forecast, said["forecast"] = self._forecast(self.foresight.forecast, model, entering, truth, batch)
            loss = loss + self.loss.forecast * forecast
        yield loss, said

    def _ahead(
        self, model: Decoder, entering: Sequence[Tensor], truth: Mapping[int, Tensor], step: Step, rows: Tensor
    ) -> tuple[Tensor, float]:
        """Loss and recall of p."""
        loss, recall = entering[0].new_zeros(()), 0.0
        for depth, p in self._accelerated(model, entering[0], step):
            for index in self.foresight.targets(depth):
                guess = self.foresight.at(index, p[rows], entering[depth][rows])
                kl, right = self._compare(model, index, guess, truth[index])
                away = (1 - F.cosine_similarity(p[rows].float(), truth[index].float(), dim=-1)).mean()
                loss = loss + self.loss.routing * kl + self.loss.alignment * away
                recall += right / len(truth)
        return loss / len(truth), recall

    def _forecast(
        self,
        forecast: Forecast,
        model: Decoder,
        entering: Sequence[Tensor],
        truth: Mapping[int, Tensor],
        batch: Batch,
    ) -> tuple[Tensor, float]:
        """Loss and recall of what the end of a pass says of the next; an answer's last token has no next."""
        assert model.config.moe is not None
        rows, top_k = batch.predicting, model.config.moe.top_k
        scored = batch.scored.clone()
        scored[:, 0] = False  # nothing is before it
        follows = scored.reshape(-1)[rows]
        places, chosen = rows[follows], []
        for index, u in truth.items():
            layer = model.layers[index]
            assert isinstance(layer, Layer)
            logits = layer.route(u[follows])
            chosen.append(torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.topk(top_k, -1)[1], value=True))
        last, first = entering[-1][places - 1], entering[0][places]
        return forecast_loss(forecast, last, first, torch.stack(chosen, 1), top_k)

    def updated(self) -> None:
        """Nothing follows an optimiser step."""

    def _accelerated(self, model: Decoder, p: Tensor, step: Step) -> Iterator[tuple[int, Tensor]]:
        """(layers gone through, residuals (B * T, E)), from none on."""
        deltas = self.foresight.terms(torch.zeros(step.num_rows, dtype=torch.int64))
        reading = replace(step, num_write=0, num_feed=0, deltas=(deltas,))
        yield 0, p
        for index in range(self.foresight.config.depth(model.config.num_layers)):
            p = model.run(p, reading, index, index + 1)
            yield index + 1, p

    def _compare(self, model: Decoder, index: int, seen: Tensor, u: Tensor) -> tuple[Tensor, float]:
        """Mean KL of the routings of two residuals (n, E), and recall of the true top k."""
        layer, moe = model.layers[index], model.config.moe
        assert isinstance(layer, Layer)
        assert moe is not None
        guess = layer.route(seen).float()
        true = layer.route(u).float()
        kl = F.kl_div(F.log_softmax(guess, -1), F.log_softmax(true, -1), reduction="batchmean", log_target=True)
        with torch.no_grad():
            found, sought = guess.topk(moe.top_k, -1)[1], true.topk(moe.top_k, -1)[1]
            right = (sought[:, :, None] == found[:, None, :]).any(-1).float().mean()
        return kl, float(right)


@torch.no_grad()
def _slow(model: Decoder, tokens: Tensor, step: Step, rows: Tensor) -> tuple[list[Tensor], dict[int, Tensor]]:
    """The frozen pass: h^n (B * T, E) from none to all layers, and u_m (n, E) of some rows for each mixture m."""
    h = model.embed(tokens, step)
    entering: list[Tensor] = []
    read: dict[int, Tensor] = {}
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        entering.append(h)
        u = layer.attend(h, step)
        if model.config.is_moe(index):
            read[index] = u[rows]
        h = layer.feed(u, step)
    return [*entering, h], read
