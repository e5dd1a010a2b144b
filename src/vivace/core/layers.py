"""The modules that a layer consists of: projections, norms and the feed-forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.config import Activation, ModelConfig
from vivace.core.low_rank import add_low_rank
from vivace.core.step import Step
from vivace.kernels import reference as kernels
from vivace.kernels.coded import Coded


class Linear(nn.Module):
    """``x W^T + b``, optionally added to a residual; the bits of a row do not depend on the other rows of a call."""

    def __init__(self, in_width: int, out_width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.coded: Coded | None = None
        """The matrix as codes of few bits, in the place of ``weight``, until a backend lays them out."""
        self.weight = nn.Parameter(torch.empty(out_width, in_width))
        self.bias = nn.Parameter(torch.empty(out_width)) if bias else None

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Make a linear layer that shares a matrix (out, in) and a bias (out,), if there is one."""
        with torch.device("meta"):
            made = Linear(weight.shape[1], weight.shape[0])
        made.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        made.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        return made

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Project rows, (T, in) -> (T, out), and add ``add`` (T, out) if it is given."""
        y = kernels.linear(x, self.weight, self.bias)
        return y if add is None else add + y


class SplitLinear(nn.Module):
    """Several projections of the same input whose outputs are concatenated; their weights belong to other modules."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Project rows, (T, in) -> (T, sum of the parts' outs), and add ``add`` if it is given."""
        y = torch.cat([part(x) for part in self.parts], -1)
        return y if add is None else add + y


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension, (..., width) -> (..., width)."""
        return kernels.rms_norm(x, self.weight, self.eps, self.offset)


class LayerNorm(nn.Module):
    """Layer norm with weight and bias (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension, (..., width) -> (..., width)."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def make_norm(config: ModelConfig, width: int | None = None) -> nn.Module:
    """Make a norm of the model's kind over ``width`` components, E if it is not given."""
    width = config.width if width is None else width
    if config.norm == "layer":
        return LayerNorm(width, config.norm_eps)
    return RMSNorm(width, config.norm_eps, config.norm_offset)


def activate(x: Tensor, kind: Activation) -> Tensor:
    """Apply the activation function of a feed-forward."""
    match kind:
        case "silu":
            return kernels.pointwise(F.silu, x)
        case "gelu":
            return kernels.pointwise(F.gelu, x)
        case "gelu_tanh":
            return kernels.pointwise(_gelu_tanh, x)
        case "relu":
            return F.relu(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class FeedForward(nn.Module):
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` without a gate."""

    def __init__(self, config: ModelConfig, layer: int, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.activation: Activation = config.activation
        self.gated = config.gated
        self.layer = layer
        self.up = up
        """Projection to gate and up side by side, (2F, E), when gated; to up alone, (F, E), otherwise."""
        self.down = down

    def forward(self, x: Tensor, step: Step, add: Tensor | None = None) -> Tensor:
        """Compute the feed-forward of rows, (T, E) -> (T, E), and add ``add`` (T, E) if it is given."""
        inner = self.up(x)
        names = ("gate", "up") if self.gated else ("up",)
        add_low_rank(inner, x, step.low_rank, self.layer, dict.fromkeys(names, inner.shape[1] // len(names)))
        if self.gated:
            gate, up = inner.chunk(2, -1)
            inner = activate(gate, self.activation) * up
        else:
            inner = activate(inner, self.activation)
        y: Tensor = self.down(inner, add)
        add_low_rank(y, inner, step.low_rank, self.layer, {"down": y.shape[1]})
        return y
