"""Experts foreseen by an accelerated residual (M2R2, Bhendawade et al. 2025, arXiv:2502.02040).

The residual p of ``residual.py`` in its ``lite`` form, which runs no expert, covers in one layer what the slow stream
covers in ``rate`` R > 1: after n layers it is to be where the slow residual is at layers R n .. R n + R, the last not
included, and the frozen routers of those layers are asked about it:

    p^0 = h^0      g_m = Router_m(LN2_m(s_m p^n + t_m h^n)),  n = floor(m / R),  m > n
    expected at m: the top k' of g_m

A router can also be asked about the slow residual l layers before its own, where it has not been trained to stand. A
matrix for each such *lead*, added to the router's, teaches it what attention and experts in between will make of it:

    g_lm = (W_m + V_lm) RMS(h^(m-l)),  and with leads W_m + V_m stands for p's routers too

A router reads the residual u_m *after* its layer's attention, so that, and not the layer's input, is what p learns to
be (``ForesightObjective``):

    L = mean over m, t of  a_rt KL(softmax Router_m(LN2_m(u_m)) || softmax g_m) + a_al (1 - cos(p^n, u_m))
        + the same KL of each g_lm

The guess only moves loads earlier (``foreseeing.py``); what runs is what the true router chooses. That an accelerated
residual tells which experts come is the paper's; its rates, its losses, the scales s_m and t_m (the slow residual is
there too when p is), the matrices V and that one p speaks for R layers are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.config import ModelConfig
from vivace.core.cpu.packed import NativeNorm, PackedLinear
from vivace.core.layers import RMSNorm
from vivace.core.low_rank import LowRank, site_shapes
from vivace.core.model import Decoder, Layer
from vivace.core.moe import MixtureOfExperts
from vivace.core.step import Step
from vivace.errors import ConfigError, UnsupportedError
from vivace.methods.foresight.forecast import Forecast, forecast_loss
from vivace.train.data import DecoderObjective, TokenBatch
from vivace.train.distillation import FrozenPass, divergence
from vivace.train.objective import Parts

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
    leads: tuple[int, ...] = ()
    """Layers ahead for which routers are taught to be asked early; others may be asked as they are."""

    def __post_init__(self) -> None:
        if self.rate is not None and not self.rate > 1:
            raise ConfigError(f"rate must be above 1 for experts to be foreseen, found {self.rate}")
        if min(self.rank, self.forecast) < 0 or self.bottleneck < 1:
            raise ConfigError(
                "rank and forecast must be >= 0 and bottleneck >= 1, found "
                f"{self.rank}, {self.forecast} and {self.bottleneck}"
            )
        if self.rate is None and not self.forecast and not self.leads:
            raise ConfigError("foresight without a rate, a forecast and leads sees nothing; give one of them")
        if min(self.leads, default=1) < 1 or len(set(self.leads)) < len(self.leads):
            raise ConfigError(f"leads must be different numbers of layers, at least 1, found {self.leads}")

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
    """Ask each router so many layers before it runs, about the slow residual, for as many as it takes: what was missed
    may still come, and what was wrong may still be left alone."""
    at_least: float = 0.7
    """Probability from which an expert that is forecast is expected."""

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ConfigError(f"count must be at least 1, found {self.count}")
        if min(self.leads, default=1) < 1:
            raise ConfigError(f"leads must be at least 1 layer, found {self.leads}")
        if not 0 < self.at_least < 1:
            raise ConfigError(f"at_least must be a probability between 0 and 1, found {self.at_least}")


class Foresight(LowRank):
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
        ranks = {"q": config.rank, "o": config.rank, "mlp": config.bottleneck}
        super().__init__(site_shapes(model, range(config.depth(model.num_layers)), ranks))
        self.config = config
        self.model = model
        self.scale: nn.Parameter | None = None
        """s_m, (layers, E), before the norm of the router that is asked; None without a rate."""
        self.slow_scale: nn.Parameter | None = None
        """t_m, (layers, E), of the slow residual at p's depth."""
        if config.rate is not None:
            self.scale = nn.Parameter(torch.full((model.num_layers, model.width), P_AT_FIRST))
            self.slow_scale = nn.Parameter(torch.ones(model.num_layers, model.width))
        self.forecast = Forecast(model, config.forecast) if config.forecast else None
        routers = model.num_layers, model.moe.num_experts, model.width
        self.near = nn.Parameter(torch.zeros(len(config.leads), *routers)) if config.leads else None
        """V_lm, (leads, layers, X, E); None without leads."""
        self.far = nn.Parameter(torch.zeros(routers)) if config.leads and config.rate is not None else None
        """V_m of p's routers, (layers, X, E)."""

    def targets(self, depth: int) -> Iterator[int]:
        """Mixtures that p speaks for after ``depth`` layers."""
        return filter(self.model.is_moe, self.config.targets(depth, self.model.num_layers))

    def router(self, layer: Layer, lead: int | None) -> Tensor:
        """What a router (X, E) multiplies a residual of mean square 1 by, so many layers early; None asks about p."""
        rows = router_rows(layer)
        if lead is None:
            return rows if self.far is None else rows + self.far[layer.index]
        if self.near is None or lead not in self.config.leads:
            return rows
        return rows + self.near[self.config.leads.index(lead), layer.index]

    def scales(self, layers: Iterable[int]) -> tuple[Tensor, Tensor]:
        """s_m and t_m of some layers, each (n, E)."""
        assert self.scale is not None, "no residual is accelerated without a rate"
        assert self.slow_scale is not None
        which = list(layers)
        return self.scale[which], self.slow_scale[which]

    def at(self, layer: int, p: Tensor, slow: Tensor) -> Tensor:
        """What stands for the residual that the router of a layer will read, (T, E); ``slow`` is at p's depth."""
        scale, slow_scale = self.scales([layer])
        return p * scale + slow * slow_scale


def router_rows(layer: Layer) -> Tensor:
    """The router of a layer (X, E) as it acts on a residual whose mean square is 1, float32."""
    mixture, norm = layer.feed_forward, layer.ffn_norm
    assert isinstance(mixture, MixtureOfExperts)
    found = mixture.router
    weight = found.matrix.rows_of_weights() if isinstance(found, PackedLinear) else found.weight
    assert isinstance(weight, Tensor)
    assert norm is None or isinstance(norm, RMSNorm | NativeNorm)
    return weight.float() if norm is None else weight.float() * (norm.weight + norm.offset).float()


def of_mean_square_one(x: Tensor, model: ModelConfig) -> Tensor:
    """Residuals (..., E) as routers' rows read them, float32."""
    return x.float() if model.norm_placement == "post" else F.rms_norm(x.float(), x.shape[-1:], eps=model.norm_eps)


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


class ForesightObjective(DecoderObjective):
    """Owns a foresight, leaves the decoder as it is."""

    def __init__(self, foresight: Foresight, loss: ForesightLoss) -> None:
        assert foresight.model.moe is not None
        self.foresight = foresight
        self.loss = loss
        self._top_k = foresight.model.moe.top_k

    def groups(self) -> Sequence[Mapping[str, object]]:
        """All adapter weights, no decay."""
        return [{"params": list(self.foresight.parameters()), "name": "foresight", "weight_decay": 0.0}]

    def losses(self, model: Decoder, batch: TokenBatch) -> Parts:
        """One loss over all mixtures and answer positions, ready for ``backward``.

        ``recall`` is of the top k by the accelerated residual, ``forecast`` of those that are forecast, ``lead_l`` of
        those that routers name l layers early.
        """
        rows, count = batch.predicting, model.config.num_layers
        mixtures = list(filter(model.config.is_moe, range(count)))
        frozen = FrozenPass.of(model, batch.tokens, range(count), attended=mixtures, rows=rows)
        routed = {index: model.layers[index].route(u) for index, u in frozen.attended.items()}  # type: ignore[operator]
        loss, said = frozen.embedded.new_zeros(()), {}
        if self.foresight.config.rate is not None:
            loss, said["recall"] = self._ahead(model, frozen, routed, rows)
        if self.foresight.forecast is not None:
            forecast, said["forecast"] = self._forecast(self.foresight.forecast, frozen, routed, batch)
            loss = loss + self.loss.forecast * forecast
        for lead in self.foresight.config.leads:
            kl, said[f"lead_{lead}"] = self._early(lead, model, frozen, routed, rows)
            loss = loss + self.loss.routing * kl
        yield loss, said

    def _early(
        self, lead: int, model: Decoder, frozen: FrozenPass, routed: Mapping[int, Tensor], rows: Tensor
    ) -> tuple[Tensor, float]:
        """Loss and recall of routers that are asked a lead early about the slow residual; the embedding tells none."""
        layers = [index for index in routed if index > lead]
        seen = ((index, self._asked(model, index, lead, frozen.residuals[index - lead][rows])) for index in layers)
        found = [self._compare(guess, routed[index]) for index, guess in seen]
        if not found:
            return frozen.embedded.new_zeros(()), 0.0
        return torch.stack([kl for kl, _ in found]).mean(), sum(right for _, right in found) / len(found)

    def _asked(self, model: Decoder, index: int, lead: int | None, residual: Tensor) -> Tensor:
        """Logits of an early router (n, X), in float32 whatever the rest of the pass is in."""
        layer = model.layers[index]
        assert isinstance(layer, Layer)
        with torch.autocast(residual.device.type, enabled=False):
            return F.linear(of_mean_square_one(residual, model.config), self.foresight.router(layer, lead))

    def _ahead(
        self, model: Decoder, frozen: FrozenPass, routed: Mapping[int, Tensor], rows: Tensor
    ) -> tuple[Tensor, float]:
        """Loss and recall of p."""
        loss, recall, truth = frozen.embedded.new_zeros(()), 0.0, frozen.attended
        for depth, p in self._accelerated(model, frozen.embedded, frozen.step):
            for index in self.foresight.targets(depth):
                seen = self.foresight.at(index, p[rows], frozen.residuals[depth][rows])
                guess = self._asked(model, index, None, seen)
                kl, right = self._compare(guess, routed[index])
                away = (1 - F.cosine_similarity(p[rows].float(), truth[index].float(), dim=-1)).mean()
                loss = loss + self.loss.routing * kl + self.loss.alignment * away
                recall += right / len(truth)
        return loss / len(truth), recall

    def _forecast(
        self, forecast: Forecast, frozen: FrozenPass, routed: Mapping[int, Tensor], batch: TokenBatch
    ) -> tuple[Tensor, float]:
        """Loss and recall of what the end of a pass says of the next, from a prompt's last token on."""
        rows, top_k = batch.predicting, self._top_k
        follows = rows % batch.tokens.shape[1] > 0
        places, chosen = rows[follows], []
        for each in routed.values():
            logits = each[follows]
            chosen.append(torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.topk(top_k, -1)[1], value=True))
        last, first = frozen.final[places - 1], frozen.embedded[places]
        return forecast_loss(forecast, last, first, torch.stack(chosen, 1), top_k)

    def _accelerated(self, model: Decoder, p: Tensor, step: Step) -> Iterator[tuple[int, Tensor]]:
        """(layers gone through, residuals (B * T, E)), from none on."""
        deltas = self.foresight.deltas(torch.zeros(step.num_rows, dtype=torch.int64))
        reading = replace(step, num_write=0, num_feed=0, deltas=(deltas,))
        yield 0, p
        for index in range(self.foresight.config.depth(model.config.num_layers)):
            p = model.run(p, reading, index, index + 1)
            yield index + 1, p

    def _compare(self, guess: Tensor, routed: Tensor) -> tuple[Tensor, float]:
        """Mean KL of guessed logits (n, X) and those of the router itself, and recall of its top k."""
        true, top_k = routed.float(), self._top_k
        kl = divergence(guess, true) / len(guess)
        with torch.no_grad():
            found, sought = guess.topk(top_k, -1)[1], true.topk(top_k, -1)[1]
            right = (sought[:, :, None] == found[:, None, :]).any(-1).float().mean()
        return kl, float(right)
