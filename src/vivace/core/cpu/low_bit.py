"""Modules over weights in few bits: projections, the head, and the embedding's rows.

The formats are in ``kernels/low_bit.py``, ``palette.py`` and ``exact.py``. With a native body they are multiplied
natively, without one in PyTorch; numbers of the former are the same.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from vivace.errors import UnsupportedError
from vivace.kernels.low_bit import Rounded, multiply
from vivace.kernels.native import Matrix, NativeBody


class LowBitLinear(nn.Module):
    """``x W^T + b`` over rounded weights, optionally added to a residual; can choose its largest output."""

    def __init__(self, weight: Rounded, bias: Tensor | None = None, body: NativeBody | None = None) -> None:
        super().__init__()
        self.body = body
        self.weight = weight
        self.codes = frozen(weight.codes)
        self.scales = frozen(weight.scales)
        self.bias = None if bias is None else frozen(bias.clone())

    @cached_property
    def matrix(self) -> Matrix:
        """The weights for the body."""
        return Matrix(self.weight, self.bias, self.weight.in_width, self.weight.out_width)

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """(T, in) -> (T, out)."""
        refuse_gradients(x)
        if self.body is not None:
            return self.body.linear(self.matrix, x, add)
        y = multiply(x, self.weight, self.bias)
        return y if add is None else add + y

    def greedy(self, x: Tensor) -> Tensor:
        """Index of each row's largest output, (T, in) -> (T,)."""
        if self.body is not None:
            refuse_gradients(x)
            return self.body.greedy(self.matrix, x)
        return self.forward(x).float().argmax(-1)


class LowBitRows(nn.Module):
    """Rows of a rounded matrix, as an embedding gives them."""

    def __init__(self, weight: Rounded, dtype: torch.dtype, body: NativeBody | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.codes = frozen(weight.codes)
        self.scales = frozen(weight.scales)
        self.dtype = dtype
        self.body = body

    @cached_property
    def matrix(self) -> Matrix:
        """The table for the body."""
        return Matrix(self.weight, None, self.weight.in_width, self.weight.out_width)

    def forward(self, tokens: Tensor) -> Tensor:
        """(T,) -> (T, E)."""
        if self.body is not None:
            return self.body.rows(self.matrix, tokens)
        return self.weight.rows(tokens).to(self.dtype)


def frozen(values: Tensor) -> nn.Parameter:
    """A parameter that stays as it is, over the same storage."""
    return nn.Parameter(values.detach(), requires_grad=False)


def refuse_gradients(x: Tensor) -> None:
    """Packed weights answer; they do not learn.

    Raises:
        UnsupportedError: somebody wants a gradient through them.
    """
    if x.requires_grad:
        raise UnsupportedError("packed weights cannot be trained; load the model with kernels='torch'")
