"""Routers, which decide that a token may exit: ARLA, and those it is compared with.

ARLA (accelerated-residual latent attention; M2R2, arXiv:2502.02040) reads the *trail* of the accelerated residual, its
states on the way to the gate, by attention over depth in a small latent space. With ``c_n`` the latent of the state at
depth n and g the gate:

    c_n = W_n rms(p[n]) + d_n                       q = U_q c_g     k_n = U_k c_n     v_n = U_v c_n
    s   = w . [c_g ; sum_n softmax_n(q . k_n / sqrt(size)) v_n] + b

and sigmoid(s) is the probability that the gate's token is the whole model's. Attention runs over depth, never over
tokens, so a token's score does not depend on others. Name and role are the paper's; the form is ours.

The others are ``linear`` and ``mlp`` on the last state, ``gap`` (probability of the gate's likeliest token minus that
of the second) and ``cosine`` (of the last two states); the last two have no weights and are from CALM (Schuster et al.
2022, arXiv:2207.07061).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.errors import ConfigError
from vivace.methods.dynamic.gates import GatesConfig

ExitLogits = Callable[[], Tensor]
"""Returns the gate's logits (n, V), which are computed only when a router asks for them."""

RouterKind = Literal["arla", "linear", "mlp", "gap", "cosine"]


@dataclass(frozen=True)
class RouterConfig:
    """Which router, its size, and the depths it reads."""

    kind: RouterKind = "arla"
    """``arla``, or one that it is compared with: ``linear``, ``mlp``, ``gap``, ``cosine``."""
    latent: int = 64
    """Width of the latent (``arla``) or of the hidden layer (``mlp``)."""
    stride: int = 2
    """Distance, in layers, between the states of a trail, counted down from the gate."""

    def __post_init__(self) -> None:
        if self.kind not in ("arla", "linear", "mlp", "gap", "cosine"):
            raise ConfigError(f"router kind must be arla, linear, mlp, gap or cosine, found {self.kind!r}")
        if self.latent < 1 or self.stride < 1:
            raise ConfigError(f"latent and stride must be at least 1, found {self.latent} and {self.stride}")

    def depths(self, gates: GatesConfig, gate: int) -> tuple[int, ...]:
        """Return the depths of a gate's trail, ascending; the last is the gate."""
        start, stop = gates.interval(gate)
        return tuple(range(stop, start, -self.stride))[::-1]


class Router(nn.Module):
    """Scores trails: the higher the score, the more likely the gate is right."""

    def forward(self, gate: int, trail: Tensor, exit_logits: ExitLogits) -> Tensor:
        """Return the score (n,) float32, before the sigmoid for routers that are trained with one.

        Args:
            gate: index of the gate, from 0.
            trail: (n, depths, E) accelerated residuals, the last one at the gate.
            exit_logits: returns the gate's logits.
        """
        raise NotImplementedError

    def score(self, gate: int, trail: Tensor, exit_logits: ExitLogits) -> Tensor:
        """Return how confident the router is, (n,) float32: a probability for routers that are trained."""
        score: Tensor = self(gate, trail, exit_logits)
        return score.sigmoid()


class ArlaRouter(Router):
    """Attention over depth on a latent of the trail."""

    def __init__(self, depths: Sequence[int], width: int, latent: int) -> None:
        """Make an untrained router.

        Args:
            depths: length of each gate's trail.
            width: E.
            latent: width of the latent.
        """
        super().__init__()
        self.down = nn.ParameterList(_noise(count, width, latent, fan_in=width) for count in depths)
        self.depth = nn.ParameterList(_noise(count, latent, fan_in=latent) for count in depths)
        self.mix = nn.ParameterList(_noise(latent, 3 * latent, fan_in=latent) for _ in depths)
        self.read = nn.ParameterList(_noise(2 * latent, fan_in=2 * latent) for _ in depths)
        self.bias = nn.Parameter(torch.zeros(len(depths)))

    def forward(self, gate: int, trail: Tensor, exit_logits: ExitLogits) -> Tensor:
        """Return logits, (n, depths, E) -> (n,)."""
        latent = torch.einsum("nde,del->ndl", rms(trail), self.down[gate]) + self.depth[gate]
        queries, keys, values = (latent @ self.mix[gate]).chunk(3, -1)
        weights = torch.softmax((keys @ queries[:, -1, :, None]) / math.sqrt(latent.shape[-1]), 1)
        seen = torch.cat((latent[:, -1], (weights * values).sum(1)), -1)
        score: Tensor = seen @ self.read[gate] + self.bias[gate]
        return score


class LastStateRouter(Router):
    """A linear map of the state at the gate, or two with a silu between."""

    def __init__(self, num_gates: int, width: int, hidden: int | None) -> None:
        """Make an untrained router; ``hidden`` None is the linear one."""
        super().__init__()
        inner = width if hidden is None else hidden
        self.inner = nn.ParameterList(_noise(width, inner, fan_in=width) for _ in range(num_gates if hidden else 0))
        self.inner_bias = nn.Parameter(torch.zeros(num_gates, inner)) if hidden else None
        self.read = nn.Parameter(torch.zeros(num_gates, inner) if hidden is None else _draw(num_gates, inner))
        self.bias = nn.Parameter(torch.zeros(num_gates))

    def forward(self, gate: int, trail: Tensor, exit_logits: ExitLogits) -> Tensor:
        """Return logits, (n, depths, E) -> (n,)."""
        x = rms(trail[:, -1])
        if self.inner_bias is not None:
            x = F.silu(x @ self.inner[gate] + self.inner_bias[gate])
        score: Tensor = x @ self.read[gate] + self.bias[gate]
        return score


class SoftmaxGap(Router):
    """The largest probability minus the second; it runs the head at every gate."""

    def forward(self, gate: int, trail: Tensor, exit_logits: ExitLogits) -> Tensor:
        """Return gaps, (n, depths, E) -> (n,)."""
        first, second = torch.softmax(exit_logits().float(), -1).topk(2).values.unbind(-1)
        return first - second

    def score(self, gate: int, trail: Tensor, exit_logits: ExitLogits) -> Tensor:
        """Return the gap, which is compared with thresholds as it is."""
        return self.forward(gate, trail, exit_logits)


class Saturation(Router):
    """The cosine of the last two states: near one where the residual no longer changes its direction."""

    def forward(self, gate: int, trail: Tensor, exit_logits: ExitLogits) -> Tensor:
        """Return cosines, (n, depths, E) -> (n,)."""
        return F.cosine_similarity(trail[:, -1].float(), trail[:, -2].float(), dim=-1)

    def score(self, gate: int, trail: Tensor, exit_logits: ExitLogits) -> Tensor:
        """Return the cosine, which is compared with thresholds as it is."""
        return self.forward(gate, trail, exit_logits)


def make_router(config: RouterConfig, gates: GatesConfig, width: int) -> Router:
    """Return the untrained router that a config names.

    Raises:
        ConfigError: the cosine of two states is asked for and a trail has one.
    """
    counts = [len(config.depths(gates, gate)) for gate in range(len(gates.gates))]
    match config.kind:
        case "arla":
            return ArlaRouter(counts, width, config.latent)
        case "linear":
            return LastStateRouter(len(counts), width, None)
        case "mlp":
            return LastStateRouter(len(counts), width, config.latent)
        case "gap":
            return SoftmaxGap()
        case "cosine":
            if min(counts) < 2:
                raise ConfigError(f"cosine compares two states and a gate's trail has {min(counts)}; lower stride")
            return Saturation()


def rms(x: Tensor) -> Tensor:
    """Return rows scaled to a root mean square of one, in float32."""
    x = x.float()
    y: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return y


def _draw(*shape: int) -> Tensor:
    noise: Tensor = torch.randn(*shape) * shape[-1] ** -0.5
    return noise


def _noise(*shape: int, fan_in: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * fan_in**-0.5)
