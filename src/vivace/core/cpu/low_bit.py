"""Modules with quantized weights: projections, the head, and the embedding.

The formats are defined in ``kernels/low_bit.py``, ``palette.py`` and ``exact.py``. Products are computed by native
kernels if there are any, else in PyTorch.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from vivace.errors import UnsupportedError
from vivace.kernels.low_bit import Rounded, multiply
from vivace.kernels.native import Matrix, NativeBody
from vivace.kernels.screen import Screen


class LowBitLinear(nn.Module):
    """``x W^T + b`` with quantized weights, optionally added to a residual."""

    def __init__(
        self,
        weight: Rounded,
        bias: Tensor | None = None,
        body: NativeBody | None = None,
        screen: Screen | None = None,
    ) -> None:
        super().__init__()
        self.body = body
        self.weight = weight
        self.screen = screen
        self.codes = frozen(weight.codes)
        self.scales = frozen(weight.scales)
        self.bias = None if bias is None else frozen(bias.clone())

    @cached_property
    def matrix(self) -> Matrix:
        """The weights in the form that native kernels take."""
        return Matrix(self.weight, self.bias, self.weight.in_width, self.weight.out_width, self.screen)

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Project rows, (T, in) -> (T, out), and add ``add`` (T, out) if it is given."""
        refuse_gradients(x)
        if self.body is not None:
            return self.body.linear(self.matrix, x, add)
        y = multiply(x, self.weight, self.bias)
        return y if add is None else add + y

    def greedy(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's largest output with its index before it, (T, in) -> (T,) each."""
        if self.body is not None:
            refuse_gradients(x)
            return self.body.greedy(self.matrix, x)
        outputs = self.forward(x).float()
        chosen = outputs.argmax(-1)
        return chosen, outputs.gather(1, chosen[:, None])[:, 0]


class LowBitRows(nn.Module):
    """An embedding whose matrix is quantized."""

    def __init__(self, weight: Rounded, dtype: torch.dtype, body: NativeBody | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.codes = frozen(weight.codes)
        self.scales = frozen(weight.scales)
        self.dtype = dtype
        self.body = body

    @cached_property
    def matrix(self) -> Matrix:
        """The matrix in the form that native kernels take."""
        return Matrix(self.weight, None, self.weight.in_width, self.weight.out_width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens, (T,) -> (T, E)."""
        if self.body is not None:
            return self.body.rows(self.matrix, tokens)
        return self.weight.rows(tokens).to(self.dtype)


def frozen(values: Tensor) -> nn.Parameter:
    """Return a parameter without gradients that shares the tensor's memory."""
    return nn.Parameter(values.detach(), requires_grad=False)


def refuse_gradients(x: Tensor) -> None:
    """Refuse an input that gradients are needed of, since packed weights cannot be trained.

    Raises:
        UnsupportedError: the input requires gradients.
    """
    if x.requires_grad:
        raise UnsupportedError("packed weights cannot be trained; load the model with kernels='torch'")
