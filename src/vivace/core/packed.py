"""A decoder whose weights lie as a native body reads them: packed once after loading, one copy in memory.

``pack_decoder`` puts other modules in the places of ``layers.py``'s; what calls them does not notice. Calls of
any size run the same kernels, in blocks of rows, so a row's bits never depend on its neighbours. Layers of the
common kind also run as a whole span (``span.py``) with the same bits.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from vivace.core.attention import Attention
from vivace.core.config import Activation, ModelConfig
from vivace.core.layers import FeedForward, Linear, RMSNorm
from vivace.core.model import Decoder, Layer
from vivace.core.span import NativeSpan
from vivace.core.step import Step
from vivace.errors import UnsupportedError
from vivace.kernels.native import MAX_GROUP, Matrix, NativeBody, pack


class PackedLinear(nn.Module):
    """``x W^T + b`` over packed weights, optionally added to a residual; can choose its largest output."""

    def __init__(self, body: NativeBody, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.body = body
        self.out_width, self.in_width = weight.shape
        self.weight = _frozen(pack(weight))
        """(tiles, pairs, 16, 2)."""
        self.bias = None if bias is None else _frozen(bias.contiguous())

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
        self.weight = _frozen(norm.weight.contiguous())
        self.eps = norm.eps
        self.offset = norm.offset

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        refuse_gradients(x)
        return self.body.rms_norm(x, self.weight, self.eps, self.offset)


class PackedFeedForward(nn.Module):
    """``down(act(gate(x)) * up(x))`` with gate, up and activation in one pass."""

    def __init__(self, body: NativeBody, source: FeedForward) -> None:
        super().__init__()
        assert source.gated
        assert isinstance(source.up, Linear)
        assert isinstance(source.down, Linear)
        width = source.up.weight.shape[0] // 2
        biases = (None, None) if source.up.bias is None else source.up.bias.split(width)
        self.body = body
        self.activation: Activation = source.activation
        self.layer = source.layer
        self.gate = PackedLinear(body, source.up.weight[:width], biases[0])
        self.up = PackedLinear(body, source.up.weight[width:], biases[1])
        self.down = PackedLinear(body, source.down.weight, source.down.bias)

    def forward(self, x: Tensor, step: Step, add: Tensor | None = None) -> Tensor:
        """(T, E) -> (T, E)."""
        refuse_gradients(x)
        sites = (self.layer, "gate"), (self.layer, "up")
        if any(site in deltas.down for deltas in step.deltas for site in sites):
            gate, up = self.gate(x), self.up(x)
            for deltas in step.deltas:
                deltas.add(gate, x, sites[0])
                deltas.add(up, x, sites[1])
            inner = self.body.activate(gate, up, self.activation)
        else:
            inner = self.body.gated(self.gate.matrix, self.up.matrix, x, self.activation)
        y: Tensor = self.down(inner, add)
        for deltas in step.deltas:
            deltas.add(y, inner, (self.layer, "down"))
        return y


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


def pack_decoder(decoder: Decoder, body: NativeBody) -> None:
    """Pack every weight of a bfloat16 decoder in place; it can no longer be trained or saved.

    Raises:
        UnsupportedError: its weights are not bfloat16.
    """
    if decoder.dtype != torch.bfloat16:
        raise UnsupportedError(
            f"the {body.name} kernels are for bfloat16 weights, this model's are {_name(decoder.dtype)}; "
            "give --dtype bfloat16 or --kernels torch"
        )
    _replace(decoder, body)
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        if type(layer.attention) is Attention and decoder.config.group <= MAX_GROUP:
            layer.attention = NativeAttention(decoder.config, layer.index, body)
    if decoder.lm_head is None:
        decoder.lm_head = TiedHead(body, decoder.embedding)
    decoder.span = NativeSpan.of(decoder, body)


def _replace(parent: nn.Module, body: NativeBody) -> None:
    for name, child in list(parent.named_children()):
        match child:
            case FeedForward() if child.gated and type(child.up) is type(child.down) is Linear:
                setattr(parent, name, PackedFeedForward(body, child))
            case Linear():
                setattr(parent, name, PackedLinear(body, child.weight, child.bias))
            case RMSNorm():
                setattr(parent, name, NativeNorm(body, child))
            case _:
                _replace(child, body)


def _frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach(), requires_grad=False)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refuse_gradients(x: Tensor) -> None:
    """Packed weights answer; they do not learn.

    Raises:
        UnsupportedError: somebody wants a gradient through them.
    """
    if x.requires_grad:
        raise UnsupportedError("packed weights cannot be trained; load the model with kernels='torch'")
