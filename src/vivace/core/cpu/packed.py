"""Modules over weights that lie as native kernels read them: packed once after loading, one copy in memory.

Calls of any size run the same kernels, in blocks of rows, so a row's bits never depend on its neighbours. Which module
takes the place of which module of ``layers.py`` is decided in ``backend.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from torch import Tensor, nn

from vivace.core.attention import Attention
from vivace.core.config import Activation, ModelConfig
from vivace.core.cpu.low_bit import frozen, refuse_gradients
from vivace.core.layers import Linear, RMSNorm
from vivace.core.moe import MixtureOfExperts
from vivace.core.step import Step
from vivace.kernels.library import LANES
from vivace.kernels.native import Matrix, NativeBody, pack


class NativeProjection(Protocol):
    """A projection that a native body runs."""

    @property
    def matrix(self) -> Matrix:
        """The weights for the body."""

    def __call__(self, x: Tensor, add: Tensor | None = None, /) -> Tensor:
        """(T, in) -> (T, out)."""


class PackedLinear(nn.Module):
    """``x W^T + b`` over packed weights, optionally added to a residual; can choose its largest output."""

    def __init__(self, body: NativeBody, weight: Tensor, bias: Tensor | None = None) -> None:
        """Pack a matrix (out, in), or take tiles that were packed before as they lie."""
        super().__init__()
        self.body = body
        is_packed = weight.dim() == 4
        tiles, pairs = weight.shape[:2]
        self.out_width, self.in_width = (tiles * LANES, pairs * 2) if is_packed else weight.shape
        self.weight = frozen(weight if is_packed else pack(weight))
        """(tiles, pairs, 16, 2)."""
        self.bias = None if bias is None else frozen(bias.contiguous())

    @cached_property
    def matrix(self) -> Matrix:
        """The weights for the body."""
        return Matrix(self.weight, self.bias, self.in_width, self.out_width)

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """(T, in) -> (T, out)."""
        refuse_gradients(x)
        return self.body.linear(self.matrix, x, add)

    def greedy(self, x: Tensor) -> Tensor:
        """Index of each row's largest output, (T, in) -> (T,), nothing written."""
        return self.body.greedy(self.matrix, x)


class TiedHead(nn.Module):
    """A head that is the embedding's own matrix, read as it lies."""

    def __init__(self, body: NativeBody, embedding: nn.Parameter) -> None:
        super().__init__()
        self.body = body
        self.weight = embedding

    @cached_property
    def matrix(self) -> Matrix:
        """The weights for the body."""
        return Matrix(self.weight, None, self.weight.shape[1], self.weight.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        """(T, E) -> (T, V)."""
        refuse_gradients(x)
        return self.body.linear(self.matrix, x)

    def greedy(self, x: Tensor) -> Tensor:
        """Index of each row's largest output, (T, E) -> (T,), nothing written."""
        return self.body.greedy(self.matrix, x)


class NativeNorm(nn.Module):
    """``RMSNorm`` by a native body."""

    def __init__(self, body: NativeBody, norm: RMSNorm) -> None:
        super().__init__()
        self.body = body
        self.weight = frozen(norm.weight.contiguous())
        self.eps = norm.eps
        self.offset = norm.offset

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        refuse_gradients(x)
        return self.body.rms_norm(x, self.weight, self.eps, self.offset)


class PackedFeedForward(nn.Module):
    """``down(act(gate(x)) * up(x))`` with gate, up and activation in one pass."""

    def __init__(
        self,
        body: NativeBody,
        activation: Activation,
        layer: int,
        gate: NativeProjection,
        up: NativeProjection,
        down: NativeProjection,
    ) -> None:
        super().__init__()
        self.body = body
        self.activation: Activation = activation
        self.layer = layer
        self.gate: NativeProjection = gate
        self.up: NativeProjection = up
        self.down: NativeProjection = down

    def forward(self, x: Tensor, step: Step, add: Tensor | None = None) -> Tensor:
        """(T, E) -> (T, E)."""
        refuse_gradients(x)
        if not step.deltas:
            matrices = self.gate.matrix, self.up.matrix, self.down.matrix  # asked each time: streamed ones move
            if matrices[2].in_width % 2 == 0:
                return self.body.feed(matrices, x, self.activation, add)
        sites = (self.layer, "gate"), (self.layer, "up")
        if any(site in deltas.down for deltas in step.deltas for site in sites):
            gate, up = self.gate(x), self.up(x)
            for deltas in step.deltas:
                deltas.add(gate, x, sites[0])
                deltas.add(up, x, sites[1])
            inner = self.body.activate(gate, up, self.activation)
        else:
            inner = self.body.gated(self.gate.matrix, self.up.matrix, x, self.activation)
        y = self.down(inner, add)
        for deltas in step.deltas:
            deltas.add(y, inner, (self.layer, "down"))
        return y


class PackedMixture(MixtureOfExperts):
    """``MixtureOfExperts`` whose router and sums a native body runs; its experts are whatever they were."""

    def __init__(self, body: NativeBody, mixture: MixtureOfExperts) -> None:
        """Take the place of another, whose router is packed here."""
        assert isinstance(mixture.router, Linear)
        router = PackedLinear(body, mixture.router.weight, mixture.router.bias)
        super().__init__(mixture.config, router, mixture.experts)
        self.body = body
        self._matrix = router.matrix

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shares and numbers of the chosen experts, each (T, top_k), the likeliest first."""
        refuse_gradients(x)
        return self.body.choose(self._matrix, x, self.config.top_k, normalise=self.config.normalise)

    def mix(self, parts: Sequence[Tensor], weights: Tensor, add: Tensor | None) -> Tensor:
        """``[add +] sum_k weights[:, k] parts[k]``, of (T, E) each, in this order."""
        return self.body.mix(parts, weights, add)


class NativeAttention(Attention):
    """``Attention`` whose single rows read their entries where they lie."""

    def __init__(self, config: ModelConfig, layer: int, body: NativeBody) -> None:
        super().__init__(config, layer)
        self.body = body

    def _rows(self, q: Tensor, keys: Tensor, values: Tensor, step: Step) -> Tensor:
        return self.body.attend_rows(
            *(q, (keys, values), step.slot, step.seen, step.tail),
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
        )
