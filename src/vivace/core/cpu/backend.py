"""The backend of native CPU kernels: it replaces modules by packed ones and runs several layers or steps in one call.

It also keeps quantized weights for PyTorch's kernels (``body`` is None then). Layers run as a span (``span.py``) and
draft whole chains (``chain.py``), with the bits they have one by one.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from torch import Tensor, nn

from vivace.core.attention import Attention
from vivace.core.backend import Backend, TorchBackend
from vivace.core.config import ModelConfig
from vivace.core.cpu.chain import NativeChain
from vivace.core.cpu.low_bit import LowBitLinear, LowBitRows, frozen
from vivace.core.cpu.packed import (
    NarrowRows,
    NativeAttention,
    NativeNorm,
    PackedFeedForward,
    PackedLinear,
    PackedMixture,
    TiedHead,
)
from vivace.core.cpu.span import NativeSpan
from vivace.core.cpu.split_layers import NativeSplitLayers, SummedSpan, is_share
from vivace.core.draft_rows import Chain
from vivace.core.el_attention import ElAttention, reader_of
from vivace.core.layers import FeedForward, LayerNorm, Linear, RMSNorm
from vivace.core.low_rank import FixedFactors
from vivace.core.model import Decoder, Layer
from vivace.core.moe import MixtureOfExperts
from vivace.core.seams import Span
from vivace.core.split_layers import SplitLayers
from vivace.core.summed import SummedLinear, SummedProjection
from vivace.errors import UnsupportedError
from vivace.kernels.coded import Coded
from vivace.kernels.exact import pack_exact
from vivace.kernels.huge_pages import HugePages
from vivace.kernels.low_bit import Rounded, Weights, quantise, size_of
from vivace.kernels.native import MAX_GROUP, NativeBody, narrowed
from vivace.kernels.screen import Screen, screen_of

ROWS_UP_TO = sys.maxsize
"""Last position at which prompt chunks are computed as single rows, all layers in one call: all of them. Entries then
have the bits that decoding would have written, however a prompt is divided, and reading is faster too (measured)."""


SCREENED_BYTES = 32 << 20
"""Bytes of a head from which on it is screened unless the caller decides: more than the caches of most processors
hold, so that greedy decoding reads them from memory in every step."""


class CpuBackend:
    """Replaces a decoder's modules by packed ones and runs them with native kernels."""

    def __init__(
        self,
        body: NativeBody | None,
        weights: Weights = "bf16",
        *,
        joins_layers: bool = True,
        screens_head: bool | None = None,
    ) -> None:
        """Set the format of the weights and the kernels that run them.

        Args:
            body: native kernels; None is PyTorch, for quantized weights.
            weights: format of the matrices. In the quantized formats the embedding and the head have eight bits;
                routers of experts and everything that is no matrix stay as they are.
            joins_layers: whether layers may run as a span; False where the weights of layers move between calls.
            screens_head: whether the head is kept a second time in int8, so that greedy decoding reads half of its
                bytes (``kernels/screen.py``); None screens heads from ``SCREENED_BYTES`` on where that is possible.
        """
        self.body = body
        self.weights: Weights = weights
        self.joins_layers = joins_layers
        self.screens_head = screens_head
        self.memory = HugePages()
        self.span: Span | None = None
        self.split: SplitLayers | None = None
        self.chain: Chain | None = None
        self.num_ranks = 1
        self.rows_up_to = 0

    @property
    def keeps_codes(self) -> bool:
        """Return whether matrices stored in few bits stay so: they are to be as stored, in bfloat16 products."""
        return self.weights == "bf16" and self.body is not None and self.body.dtype == torch.bfloat16

    def check(self, decoder: Decoder) -> None:
        """Refuse a decoder that cannot be packed in this format.

        Raises:
            UnsupportedError: the decoder is not on the CPU; or the weights are of a dtype that the native kernels, or
                the format, are not for.
        """
        if decoder.device.type != "cpu":
            raise UnsupportedError(f"{self.weights} weights are for the CPU, this model is on {decoder.device}")
        if self.weights == "exact12" and decoder.dtype != torch.bfloat16:
            raise UnsupportedError(
                f"exact12 keeps bfloat16 weights as they are, this model's are {_name(decoder.dtype)}; "
                "give --dtype bfloat16 to round them first"
            )
        if self.body is not None and decoder.dtype != self.body.dtype:
            kinds = "bfloat16" if self.weights != "bf16" else "bfloat16 and float32"
            raise UnsupportedError(
                f"the {self.body.name} kernels are for {kinds} weights, this model's are {_name(decoder.dtype)}; "
                "give --dtype bfloat16 or --kernels torch"
            )
        if self.screens_head and (reason := self._why_no_screen(decoder)) is not None:
            raise UnsupportedError(f"the head cannot be screened: {reason}; leave --screened-head out")

    def pack_ends(self, decoder: Decoder) -> None:
        """Pack the embedding, the final norm and the head."""
        if decoder.coded is not None:
            decoder.embedding = frozen(torch.empty(0, decoder.config.width, dtype=torch.bfloat16))
        self.check(decoder)
        if self.body is not None and self.body.dtype == torch.float32:
            self._narrow_embedding(decoder)
        head = decoder.lm_head
        if decoder.coded is not None:
            self._lay_out_ends(decoder, decoder.coded)
        elif isinstance(head, Linear) and head.coded is not None:
            decoder.lm_head = self.linear(head.coded, head.bias)
        elif self.weights != "bf16":
            self._round_ends(decoder)
        elif head is None:
            assert self.body is not None
            rows = decoder.embedding_rows
            weight = rows.weight if isinstance(rows, NarrowRows) else decoder.embedding
            decoder.lm_head = TiedHead(self.body, weight, self._screen(decoder, weight))
        elif isinstance(head, Linear):
            decoder.lm_head = self._packed(head.weight, head.bias, self._screen(decoder, head.weight))
        if self.body is not None and isinstance(decoder.final_norm, RMSNorm | LayerNorm):
            decoder.final_norm = NativeNorm(self.body, decoder.final_norm)

    def _lay_out_ends(self, decoder: Decoder, rows: Coded) -> None:
        """Lay out an embedding that is stored in eight bits, and the head."""
        table, head = self.memory.hold_parts(rows.packed()), decoder.lm_head
        decoder.embedding_rows = LowBitRows(table, decoder.dtype, self.body)
        if head is None:
            decoder.lm_head = LowBitLinear(table, None, self.body)
        elif isinstance(head, Linear):
            decoder.lm_head = self.linear(_stored(head), head.bias)
        decoder.coded = None

    def _narrow_embedding(self, decoder: Decoder) -> None:
        """Keep an embedding in 16 bits if these hold all of its numbers."""
        rows = narrowed(decoder.embedding)
        if rows.dtype != torch.float32:
            decoder.embedding_rows = NarrowRows(rows)
            decoder.embedding = frozen(decoder.embedding.new_empty(0, decoder.config.width))

    def _screen(self, decoder: Decoder, weight: Tensor) -> Screen | None:
        """Return the screen of a head (V, E), or None where it has none."""
        is_screened = self.screens_head
        if is_screened is None:
            is_screened = self._why_no_screen(decoder) is None and weight.nbytes >= SCREENED_BYTES
        if not is_screened:
            return None
        screen = screen_of(weight)
        return replace(screen, codes=self.memory.hold_parts(screen.codes))

    def _why_no_screen(self, decoder: Decoder) -> str | None:
        """Return why a decoder's head cannot be screened, or None if it can."""
        if self.body is None:
            return "it runs on native kernels"
        if self.body.dtype != torch.bfloat16:
            return f"that is for bfloat16 weights, this model's are {_name(self.body.dtype)}"
        if self.weights not in ("bf16", "exact12"):
            return f"with {self.weights} weights the head has eight bits itself"
        if decoder.coded is not None or getattr(decoder.lm_head, "coded", None) is not None:
            return "it is stored in few bits itself"
        return "the width of this model is odd" if decoder.config.width % 2 else None

    def _round_ends(self, decoder: Decoder) -> None:
        is_exact = self.weights == "exact12"
        weight = decoder.embedding if decoder.lm_head is None else getattr(decoder.lm_head, "weight", None)
        screen = None if weight is None else self._screen(decoder, weight)
        rows = pack_exact(decoder.embedding, "exact12_rows") if is_exact else quantise(decoder.embedding, "int8")
        table = self.memory.hold_parts(rows)
        decoder.embedding_rows = LowBitRows(table, decoder.dtype, self.body)
        decoder.embedding = frozen(decoder.embedding.new_empty(0, decoder.config.width))
        head = decoder.lm_head
        if head is None:
            decoder.lm_head = LowBitLinear(table, None, self.body, screen)
        elif isinstance(head, Linear):
            kept = quantise(head.weight, "exact12" if is_exact else "int8")
            decoder.lm_head = self._rounded(kept, head.bias, screen)

    def pack_layer(self, decoder: Decoder, index: int) -> None:
        """Pack one layer."""
        layer = decoder.layers[index]
        assert isinstance(layer, Layer)
        if isinstance(layer.cross, ElAttention):
            layer.cross.lay_out(self.projection)
        self._replace(layer)
        fits = self.body is not None and decoder.config.group <= MAX_GROUP
        if self.body is not None and fits and type(layer.attention) is Attention:
            relative = layer.attention.relative
            layer.attention = NativeAttention(decoder.config, layer.index, self.body)
            layer.attention.relative = relative
            self.rows_up_to = ROWS_UP_TO
        if self.body is not None and fits and layer.cross is not None and type(layer.cross.attention) is Attention:
            reads_states = isinstance(layer.cross, ElAttention)
            sizes = reader_of(decoder.config) if reads_states else replace(decoder.config, windows=())
            layer.cross.attention = NativeAttention(sizes, layer.cross.attention.layer, self.body)

    def finish(self, decoder: Decoder) -> None:
        """Make the span and the chain where the layers are of the common kind, and pack an encoder."""
        if decoder.encoder is not None:
            self._pack_encoder(decoder, decoder.encoder)
        if self.body is not None and self.joins_layers:
            if is_share(decoder):
                self.span = SummedSpan.of(decoder, self.body)
                return
            self.span = span = NativeSpan.of(decoder, self.body)
            self.split = None if span is None else NativeSplitLayers(span)
            self.chain = NativeChain.of(decoder, span) if self.body.dtype == torch.bfloat16 else None

    def _pack_encoder(self, decoder: Decoder, encoder: Decoder) -> None:
        """Pack the layers of an encoder; attention over whole texts stays PyTorch's."""
        encoder.embedding, encoder.embedding_rows = decoder.embedding, decoder.embedding_rows
        for layer in encoder.layers:
            self._replace(layer)
        if self.body is not None and isinstance(encoder.final_norm, RMSNorm | LayerNorm):
            encoder.final_norm = NativeNorm(self.body, encoder.final_norm)

    def projection(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        """Make a module that multiplies by a matrix (out, in) of a method, in bfloat16."""
        return Linear.of(weight, bias) if self.body is None else self._packed(weight, bias)

    def lay_out(self, factors: FixedFactors) -> int:
        """Pack an adapter's factors for spans, if layers run so; return the bytes that this takes."""
        return self.span.lay_out(factors) if isinstance(self.span, NativeSpan) else 0

    def sibling(self) -> Backend:
        """Make a backend with the same kernels for another decoder, whose weights stay in bfloat16."""
        return TorchBackend() if self.body is None else CpuBackend(self.body)

    def linear(self, weight: Tensor | Coded, bias: Tensor | None) -> PackedLinear | LowBitLinear:
        """Make the packed or quantized module of a matrix (out, in), or of its codes as they are stored."""
        if not isinstance(weight, Tensor):
            return self._rounded(weight.packed(), bias)
        if self.weights != "bf16":
            return self._rounded(quantise(weight, self.weights), bias)
        return self._packed(weight, bias)

    def _rounded(self, weight: Rounded, bias: Tensor | None, screen: Screen | None = None) -> LowBitLinear:
        return LowBitLinear(self.memory.hold_parts(weight), bias, self.body, screen)

    def _packed(self, weight: Tensor, bias: Tensor | None, screen: Screen | None = None) -> PackedLinear:
        assert self.body is not None, "PyTorch takes bfloat16 as it is"
        return PackedLinear(self.body, weight, bias, screen, self.memory)

    def _replace(self, parent: nn.Module) -> None:
        for name, child in list(parent.named_children()):
            match child:
                case MixtureOfExperts():
                    body = self.body if self.body is not None and self.body.dtype == torch.bfloat16 else None
                    if body is not None and isinstance(child.router, Linear):
                        setattr(parent, name, PackedMixture(body, child))
                    if isinstance(child.experts, nn.Module):
                        self._replace(child.experts)
                case FeedForward() if self._fuses(child):
                    setattr(parent, name, self._fused(child))
                case Linear():
                    setattr(parent, name, self._projection(child))
                case RMSNorm() | LayerNorm() if self.body is not None:
                    setattr(parent, name, NativeNorm(self.body, child))
                case _:
                    self._replace(child)

    def _fused(self, feed: FeedForward) -> PackedFeedForward:
        assert self.body is not None
        assert isinstance(feed.up, Linear)
        assert isinstance(feed.down, Linear)
        if not feed.gated:
            up, down = self.linear(_stored(feed.up), feed.up.bias), self._projection(feed.down)
            return PackedFeedForward(self.body, feed.activation, feed.layer, None, up, down)
        width = feed.up.weight.shape[0] // 2
        biases = (None, None) if feed.up.bias is None else feed.up.bias.split(width)
        coded = feed.up.coded
        parts = feed.up.weight.split(width) if coded is None else (coded.rows(0, width), coded.rows(width, 2 * width))
        gate, up = (self.linear(w, b) for w, b in zip(parts, biases, strict=True))
        return PackedFeedForward(self.body, feed.activation, feed.layer, gate, up, self._projection(feed.down))

    def _projection(self, linear: Linear) -> PackedLinear | LowBitLinear | SummedProjection:
        if isinstance(linear, SummedLinear):
            return SummedProjection(linear, self.linear)
        return self.linear(_stored(linear), linear.bias)

    def _fuses(self, feed: FeedForward) -> bool:
        return self.body is not None and type(feed.up) is Linear and type(feed.down) in (Linear, SummedLinear)


def backend_of(
    body: NativeBody | None,
    weights: Weights,
    dtype: torch.dtype,
    *,
    is_required: bool,
    screens_head: bool | None = None,
) -> CpuBackend | None:
    """Return what runs a decoder whose weights are read in this precision; None is PyTorch on the modules as they are.

    Native kernels compute in bfloat16, and in float32 where weights are not quantized. A decoder of another precision
    is left to PyTorch, unless the kernels were asked for by name: the backend then refuses it.
    """
    found = body.of(dtype) if body is not None and (weights == "bf16" or dtype == torch.bfloat16) else None
    used = body if found is None and (is_required or weights == "exact12") else found
    if used is None and weights == "bf16" and not screens_head:
        return None
    return CpuBackend(used, weights, screens_head=screens_head)


def pack_decoder(decoder: Decoder, body: NativeBody | None, weights: Weights = "bf16") -> None:
    """Pack every weight of a decoder in place; the decoder can no longer be trained or saved.

    Args:
        decoder: decoder to pack, with weights of the native kernels' dtype if there are some.
        body: native kernels that run it; None is PyTorch.
        weights: format of the matrices, as ``CpuBackend`` takes it.

    Raises:
        UnsupportedError: the decoder's weights are of another dtype.
    """
    backend = backend_of(body, weights, decoder.dtype, is_required=True)
    if backend is not None:
        decoder.run_on(backend)


def num_bytes(config: ModelConfig, weights: Weights) -> int:
    """Return the bytes of a model's weights, with matrices in a format and everything else in bfloat16."""
    with torch.device("meta"):
        decoder = Decoder(config)
    kept = {id(module.router) for module in decoder.modules() if isinstance(module, MixtureOfExperts)}
    total = sum(part.numel() * 2 for part in decoder.parameters())
    if weights == "bf16":
        return total
    ends: Weights = "exact12" if weights == "exact12" else "int8"
    quantized: list[tuple[Tensor, Weights]] = [(decoder.embedding, ends)]
    for module in decoder.modules():
        if isinstance(module, Linear) and id(module) not in kept:
            quantized.append((module.weight, ends if module is decoder.lm_head else weights))
    saved = [part.numel() * 2 - size_of(part.shape[0], part.shape[1], kind) for part, kind in quantized]
    return total - sum(saved)


def _stored(linear: Linear) -> Tensor | Coded:
    """Return the matrix of a linear layer, or its codes where it is stored in few bits."""
    return linear.weight if linear.coded is None else linear.coded


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
