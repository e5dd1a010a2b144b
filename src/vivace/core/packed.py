"""A decoder whose weights lie as a native body reads them: packed once after loading, one copy in memory.

``pack_decoder`` puts other modules in the places of ``layers.py``'s; what calls them does not notice. Calls of
any size run the same kernels, in blocks of rows, so a row's bits never depend on its neighbours. Layers of the
common kind also run as a whole span (``span.py``) with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor, nn

from vivace.core.attention import Attention
from vivace.core.chain import NativeChain
from vivace.core.config import Activation, ModelConfig
from vivace.core.layers import FeedForward, Linear, RMSNorm
from vivace.core.low_bit import LowBitLinear, LowBitRows, frozen, refuse_gradients
from vivace.core.model import Decoder, Layer
from vivace.core.moe import MixtureOfExperts
from vivace.core.span import NativeSpan
from vivace.core.step import Step
from vivace.errors import UnsupportedError
from vivace.kernels.exact import pack_exact
from vivace.kernels.library import LANES
from vivace.kernels.low_bit import Weights, quantise, size_of
from vivace.kernels.native import MAX_GROUP, Matrix, NativeBody, pack


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


ROWS_UP_TO = 512
"""Where rows by themselves, all layers in one call, cost what attention over a whole chunk at once saves (measured)."""


class Packer:
    """Puts packed modules in the places of a decoder's own, part by part, so that a loader can let go of each."""

    def __init__(self, body: NativeBody | None, weights: Weights = "bf16", *, is_required: bool = True) -> None:
        """Decide how.

        Args:
            body: what will run them; None is PyTorch, for weights in few bits.
            weights: what matrices are kept as. In few bits the embedding and the head have eight; routers of experts
                and whatever is no matrix stay as they are.
            is_required: whether a decoder that cannot be packed is refused, or left to PyTorch as it is.
        """
        self.body = body
        self.weights = weights
        self.is_required = is_required

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether a decoder of this precision is to be packed, or refused."""
        return self.is_required or dtype == torch.bfloat16

    def check(self, decoder: Decoder) -> None:
        """Whether this decoder can be packed so.

        Raises:
            UnsupportedError: native bodies compute in bfloat16, and it does not; or it has nothing to pack exactly.
        """
        if self.weights == "exact12" and decoder.dtype != torch.bfloat16:
            raise UnsupportedError(
                f"exact12 keeps bfloat16 weights as they are, this model's are {_name(decoder.dtype)}; "
                "give --dtype bfloat16 to round them first"
            )
        if self.body is not None and decoder.dtype != torch.bfloat16:
            raise UnsupportedError(
                f"the {self.body.name} kernels are for bfloat16 weights, this model's are {_name(decoder.dtype)}; "
                "give --dtype bfloat16 or --kernels torch"
            )

    def pack_ends(self, decoder: Decoder) -> None:
        """Embedding, final norm and head."""
        self.check(decoder)
        if self.weights != "bf16":
            self._round_ends(decoder)
        elif decoder.lm_head is None:
            assert self.body is not None
            decoder.lm_head = TiedHead(self.body, decoder.embedding)
        elif isinstance(decoder.lm_head, Linear):
            decoder.lm_head = self.linear(decoder.lm_head.weight, decoder.lm_head.bias)
        if self.body is not None and isinstance(decoder.final_norm, RMSNorm):
            decoder.final_norm = NativeNorm(self.body, decoder.final_norm)

    def _round_ends(self, decoder: Decoder) -> None:
        is_exact = self.weights == "exact12"
        table = pack_exact(decoder.embedding, "exact12_rows") if is_exact else quantise(decoder.embedding, "int8")
        decoder.rows = LowBitRows(table, decoder.dtype, self.body)
        decoder.embedding = frozen(decoder.embedding.new_empty(0, decoder.config.width))
        head = decoder.lm_head
        if head is None:
            decoder.lm_head = LowBitLinear(table, None, self.body)
        elif isinstance(head, Linear):
            kept = quantise(head.weight, "exact12" if is_exact else "int8")
            decoder.lm_head = LowBitLinear(kept, head.bias, self.body)

    def pack_layer(self, decoder: Decoder, index: int) -> None:
        """One layer."""
        layer = decoder.layers[index]
        assert isinstance(layer, Layer)
        self._replace(layer)
        is_plain = type(layer.attention) is Attention and decoder.config.group <= MAX_GROUP
        if self.body is not None and is_plain:
            layer.attention = NativeAttention(decoder.config, layer.index, self.body)
            decoder.rows_up_to = ROWS_UP_TO

    def finish(self, decoder: Decoder) -> None:
        """All parts are in their places."""
        if self.body is not None:
            decoder.span = span = NativeSpan.of(decoder, self.body)
            decoder.chain = NativeChain.of(decoder, span)
            decoder.projection = partial(PackedLinear, self.body)

    def linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear | LowBitLinear:
        """The module for a matrix."""
        if self.weights != "bf16":
            return LowBitLinear(quantise(weight, self.weights), bias, self.body)
        assert self.body is not None, "PyTorch takes bfloat16 as it is"
        return PackedLinear(self.body, weight, bias)

    def _replace(self, parent: nn.Module) -> None:
        for name, child in list(parent.named_children()):
            match child:
                case MixtureOfExperts():
                    if self.body is not None and isinstance(child.router, Linear):
                        setattr(parent, name, PackedMixture(self.body, child))
                    if isinstance(child.experts, nn.Module):
                        self._replace(child.experts)
                case FeedForward() if self._fuses(child):
                    setattr(parent, name, self._fused(child))
                case Linear():
                    setattr(parent, name, self.linear(child.weight, child.bias))
                case RMSNorm() if self.body is not None:
                    setattr(parent, name, NativeNorm(self.body, child))
                case _:
                    self._replace(child)

    def _fused(self, feed: FeedForward) -> PackedFeedForward:
        assert self.body is not None
        assert isinstance(feed.up, Linear)
        assert isinstance(feed.down, Linear)
        width = feed.up.weight.shape[0] // 2
        biases = (None, None) if feed.up.bias is None else feed.up.bias.split(width)
        gate, up = (self.linear(w, b) for w, b in zip(feed.up.weight.split(width), biases, strict=True))
        down = self.linear(feed.down.weight, feed.down.bias)
        return PackedFeedForward(self.body, feed.activation, feed.layer, gate, up, down)

    def _fuses(self, feed: FeedForward) -> bool:
        return self.body is not None and feed.gated and type(feed.up) is type(feed.down) is Linear


def pack_decoder(decoder: Decoder, body: NativeBody | None, weights: Weights = "bf16") -> None:
    """Pack every weight of a decoder in place; it can no longer be trained or saved.

    Args:
        decoder: with bfloat16 weights if there is a body.
        body: what runs it; None is PyTorch.
        weights: as ``Packer`` takes them.

    Raises:
        UnsupportedError: its weights are not bfloat16.
    """
    if body is None and weights == "bf16":
        return
    packer = Packer(body, weights)
    packer.pack_ends(decoder)
    for index in range(decoder.config.num_layers):
        packer.pack_layer(decoder, index)
    packer.finish(decoder)


def num_bytes(config: ModelConfig, weights: Weights) -> int:
    """Bytes a model takes in memory, matrices kept as given and everything else in bfloat16."""
    with torch.device("meta"):
        decoder = Decoder(config)
    kept = {id(module.router) for module in decoder.modules() if isinstance(module, MixtureOfExperts)}
    total = sum(part.numel() * 2 for part in decoder.parameters())
    if weights == "bf16":
        return total
    ends: Weights = "exact12" if weights == "exact12" else "int8"
    rounded: list[tuple[Tensor, Weights]] = [(decoder.embedding, ends)]
    for module in decoder.modules():
        if isinstance(module, Linear) and id(module) not in kept:
            rounded.append((module.weight, ends if module is decoder.lm_head else weights))
    saved = [part.numel() * 2 - size_of(part.shape[0], part.shape[1], kind) for part, kind in rounded]
    return total - sum(saved)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
