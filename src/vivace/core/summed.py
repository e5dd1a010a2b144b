"""Projections whose input columns are spread over ranks: each multiplies its own, a ``Collective`` adds the products.

    y = sum_r x_r W_r^T + b [+ residual]        Megatron-LM's row-parallel products (Shoeybi et al. 2019, 1909.08053)

The bias and the residual are added after the sum, once. Queries, keys, values, gate and up need no sum: each rank
computes its own rows of them. Norms over all heads at once (OLMo 2) add their sums of squares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from vivace.core.layers import Linear
from vivace.kernels import reference as kernels

Point = tuple[int, str]
"""(layer, site) at which ranks add what each of them has computed: "o", "down", "q_norm" or "k_norm"."""


class Collective(Protocol):
    """Adds what several ranks have computed, each on a part of the model's columns."""

    def all_reduce(self, x: Tensor, *, point: Point) -> Tensor:
        """Return the sum over all ranks of ``x`` (T, n), added in the order of ranks in float32, in the dtype of ``x``.

        All ranks get the same bits, and those of a row do not depend on the other rows.
        """
        ...


class SummedProducts:
    """What comes behind a rank's products."""

    collective: Collective
    point: Point
    bias: nn.Parameter | None

    def summed(self, product: Tensor, add: Tensor | None = None) -> Tensor:
        """Return the sum over ranks of their products (T, out), with the bias, and ``add`` if it is given."""
        y = self.collective.all_reduce(product, point=self.point)
        if self.bias is not None:
            y = y + self.bias
        return y if add is None else add + y


class SummedLinear(SummedProducts, Linear):
    """A rank's columns of ``x W^T + b``, run by PyTorch."""

    def __init__(self, in_width: int, out_width: int, *, bias: bool, collective: Collective, point: Point) -> None:
        """Make the part of a rank.

        Args:
            in_width: number of this rank's columns.
            out_width: width of the sum.
            bias: whether a bias is added after it.
            collective: adds the products.
            point: where in the model this is.
        """
        super().__init__(in_width, out_width, bias=bias)
        self.collective = collective
        self.point = point

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Project this rank's columns, (T, in) -> (T, out), sum over ranks, and add ``add`` if it is given."""
        return self.summed(kernels.linear(x, self.weight), add)


class SummedProjection(SummedProducts, nn.Module):
    """The same over a module that multiplies without a bias, such as one with packed or quantized weights."""

    def __init__(self, linear: SummedLinear, multiply: Callable[[Tensor, Tensor | None], nn.Module]) -> None:
        """Take over the place of a ``SummedLinear``.

        Args:
            linear: whose sum and bias are used; its weight is given to ``multiply``.
            multiply: makes the module that multiplies, from a matrix (out, in) and no bias.
        """
        super().__init__()
        self.part = multiply(linear.weight, None)
        self.bias = linear.bias
        self.collective = linear.collective
        self.point = linear.point

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Project this rank's columns, (T, in) -> (T, out), sum over ranks, and add ``add`` if it is given."""
        return self.summed(self.part(x), add)


class SummedNorm(nn.Module):
    """A root-mean-square norm over the heads of all ranks, of which each has some."""

    def __init__(
        self,
        width: int,
        whole: int,
        num_holders: int,
        *,
        eps: float,
        offset: float,
        collective: Collective,
        point: Point,
    ) -> None:
        """Make the part of a rank.

        Args:
            width: number of components that this rank has.
            whole: number of components of all ranks together.
            num_holders: number of ranks that have the same components as this one.
            eps: added to the mean square.
            offset: added to the weight.
            collective: adds the sums of squares.
            point: where in the model this is.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.whole = whole
        self.num_holders = num_holders
        self.eps = eps
        self.offset = offset
        self.collective = collective
        self.point = point

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows (T, width) by the mean square over all ranks' components."""
        y = x.float()
        total = self.collective.all_reduce(y.square().sum(-1, keepdim=True) / self.num_holders, point=self.point)
        y = y * torch.rsqrt(total / self.whole + self.eps)
        if self.offset:
            return (y * (self.offset + self.weight.float())).to(x.dtype)
        return y.to(x.dtype) * self.weight
