"""Modules whose weights are in the layout of the native kernels: packed once after loading, with one copy in memory.

Calls of any size run the same kernels, in blocks of rows, so a row's bits never depend on the other rows.
``backend.py`` decides which module of ``layers.py`` is replaced by which.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.attention import Attention
from vivace.core.cache import KVCache
from vivace.core.config import Activation, ModelConfig
from vivace.core.cpu.low_bit import frozen, refuse_gradients
from vivace.core.layers import LayerNorm, Linear, RMSNorm
from vivace.core.low_rank import add_low_rank
from vivace.core.moe import MixtureOfExperts
from vivace.core.step import Step
from vivace.core.summed import SummedProjection
from vivace.kernels.huge_pages import HugePages
from vivace.kernels.library import LANES
from vivace.kernels.native import Matrix, NativeBody, narrowed, pack
from vivace.kernels.screen import Screen


class NativeProjection(Protocol):
    """A projection that native kernels run."""

    @property
    def matrix(self) -> Matrix:
        """The weights in the form that native kernels take."""

    def __call__(self, x: Tensor, add: Tensor | None = None, /) -> Tensor:
        """Project rows, (T, in) -> (T, out), and add ``add`` (T, out) if it is given."""


class PackedLinear(nn.Module):
    """``x W^T + b`` with packed weights, optionally added to a residual."""

    def __init__(
        self,
        body: NativeBody,
        weight: Tensor,
        bias: Tensor | None = None,
        screen: Screen | None = None,
        memory: HugePages | None = None,
    ) -> None:
        """Pack a matrix (out, in), or share tiles (tiles, pairs, 16, 2) that were packed before.

        A float32 matrix is kept in 16 bits if that loses nothing.

        Args:
            body: kernels that multiply.
            weight: the matrix, or its tiles.
            bias: (out,), or None.
            screen: bounds by which ``greedy`` skips most outputs.
            memory: where tiles that are made here lie; None is PyTorch's.
        """
        super().__init__()
        self.body = body
        self.screen = screen
        is_packed = weight.dim() == 4
        count, pairs = weight.shape[:2]
        self.out_width, self.in_width = (count * LANES, pairs * 2) if is_packed else weight.shape
        tiles = weight
        if not is_packed:
            tiles = pack(narrowed(weight) if body.dtype == torch.float32 else weight, body.dtype)
            tiles = tiles if memory is None else memory.hold(tiles)
        self.weight = frozen(tiles)
        """Tiles (tiles, pairs, 16, 2), as ``pack`` arranges them."""
        self.bias = None if bias is None else frozen(bias.contiguous())

    @cached_property
    def matrix(self) -> Matrix:
        """The weights in the form that native kernels take."""
        widens = self.weight.dtype != self.body.dtype
        return Matrix(self.weight, self.bias, self.in_width, self.out_width, self.screen, widens)

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Project rows, (T, in) -> (T, out), and add ``add`` (T, out) if it is given."""
        refuse_gradients(x)
        return self.body.linear(self.matrix, x, add)

    def greedy(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's largest output with its index before it, (T, in) -> (T,) each, without storing outputs."""
        return self.body.greedy(self.matrix, x)


class TiedHead(nn.Module):
    """A head that shares the embedding's row-major matrix."""

    def __init__(self, body: NativeBody, embedding: nn.Parameter, screen: Screen | None = None) -> None:
        super().__init__()
        self.body = body
        self.weight = embedding
        self.screen = screen

    @cached_property
    def matrix(self) -> Matrix:
        """The weights in the form that native kernels take."""
        widens = self.weight.dtype != self.body.dtype
        return Matrix(self.weight, None, self.weight.shape[1], self.weight.shape[0], self.screen, widens)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, (T, E) -> (T, V)."""
        refuse_gradients(x)
        return self.body.linear(self.matrix, x)

    def greedy(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest token of each row and its logit, (T, E) -> (T,) each, without storing the logits."""
        return self.body.greedy(self.matrix, x)


class NarrowRows(nn.Module):
    """An embedding in float32 whose numbers take 16 bits."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = frozen(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens, (T,) -> (T, E)."""
        return F.embedding(tokens, self.weight).float()


class NativeNorm(nn.Module):
    """``RMSNorm`` or ``LayerNorm`` on native kernels."""

    def __init__(self, body: NativeBody, norm: RMSNorm | LayerNorm) -> None:
        super().__init__()
        self.body = body
        self.weight = frozen(norm.weight.contiguous())
        self.bias = frozen(norm.bias.contiguous()) if isinstance(norm, LayerNorm) else None
        self.eps = norm.eps
        self.offset = norm.offset if isinstance(norm, RMSNorm) else 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension, (..., width) -> (..., width)."""
        refuse_gradients(x)
        if self.bias is None:
            return self.body.rms_norm(x, self.weight, self.eps, self.offset)
        return self.body.layer_norm(x, self.weight, self.bias, self.eps)


class PackedFeedForward(nn.Module):
    """``down(act(gate(x)) * up(x))`` on native kernels, in one call where no low-rank deltas are added; without a gate
    ``down(act(up(x)))``.
    """

    def __init__(
        self,
        body: NativeBody,
        activation: Activation,
        layer: int,
        gate: NativeProjection | None,
        up: NativeProjection,
        down: NativeProjection | SummedProjection,
    ) -> None:
        super().__init__()
        self.body = body
        self.activation: Activation = activation
        self.layer = layer
        self.gate: NativeProjection | None = gate
        self.up: NativeProjection = up
        self.down: NativeProjection | SummedProjection = down

    def forward(self, x: Tensor, step: Step, add: Tensor | None = None) -> Tensor:
        """Compute the feed-forward of rows, (T, E) -> (T, E), and add ``add`` (T, E) if it is given."""
        refuse_gradients(x)
        if self.gate is not None and not step.low_rank and not isinstance(self.down, SummedProjection):
            matrices = self.gate.matrix, self.up.matrix, self.down.matrix  # read each time: streamed ones move
            if matrices[2].in_width % 2 == 0:
                return self.body.feed(matrices, x, self.activation, add)
        sites = (self.layer, "gate"), (self.layer, "up")
        is_changed = any(site in deltas.down for deltas in step.low_rank for site in sites)
        if self.gate is not None and not is_changed:
            inner = self.body.gated(self.gate.matrix, self.up.matrix, x, self.activation)
        else:
            inner = self._inner(x, step)
        y = self.down(inner, add)
        add_low_rank(y, inner, step.low_rank, self.layer, {"down": y.shape[1]})
        return y

    def _inner(self, x: Tensor, step: Step) -> Tensor:
        """Return the inputs of ``down``, (T, E) -> (T, F), with low-rank deltas added before the activation."""
        up = self.up(x)
        add_low_rank(up, x, step.low_rank, self.layer, {"up": up.shape[1]})
        if self.gate is None:
            return self.body.activate(up, None, self.activation)
        gate = self.gate(x)
        add_low_rank(gate, x, step.low_rank, self.layer, {"gate": gate.shape[1]})
        return self.body.activate(gate, up, self.activation)


class PackedMixture(MixtureOfExperts):
    """``MixtureOfExperts`` whose router and weighted sums run on native kernels; the experts stay as they are."""

    def __init__(self, body: NativeBody, mixture: MixtureOfExperts) -> None:
        """Pack the router of a mixture and share its experts."""
        assert isinstance(mixture.router, Linear)
        router = PackedLinear(body, mixture.router.weight, mixture.router.bias)
        super().__init__(mixture.config, router, mixture.experts)
        self.body = body
        self.matrix = router.matrix
        """The router in the form that native kernels take."""

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and indices of the chosen experts, each (T, top_k), the likeliest first."""
        refuse_gradients(x)
        return self.body.choose(self.matrix, x, self.config.top_k, normalise=self.config.normalise)

    def mix(self, parts: Sequence[Tensor], weights: Tensor, add: Tensor | None) -> Tensor:
        """Return ``[add +] sum_k weights[:, k] parts[k]``, (T, E), summed in this order."""
        return self.body.mix(parts, weights, add)


class NativeAttention(Attention):
    """``Attention`` on native kernels, which read the entries of single rows from the cache without gathering them."""

    def __init__(self, config: ModelConfig, layer: int, body: NativeBody) -> None:
        super().__init__(config, layer)
        self.body = body

    def _rows(self, q: Tensor, cache: KVCache, step: Step) -> Tensor:
        table = cache.tables[cache.store.place_of_layer[self.layer][0]].first
        return self.body.attend_rows(
            *(q, cache.stored(self.layer), (table, cache.store.size), step.slot, step.seen, step.tail, step.index),
            scales=cache.scales(self.layer),
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            bias=None if self.relative is None else self.relative.by_distance,
        )
