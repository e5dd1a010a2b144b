"""The weights of layers as the structs that native calls take.

``plan_of`` describes a decoder; the structs point into packed matrices and norms, which must stay alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_void_p, pointer
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vivace.core.config import ModelConfig
from vivace.core.cpu.packed import NativeNorm, PackedFeedForward, PackedMixture
from vivace.core.moe import ResidentExperts
from vivace.core.summed import SummedProjection
from vivace.kernels.library import ACTIVATIONS, FORMATS, LANES, CExpert, CGain, CLayer, CMatrix, CMixture, CPlan
from vivace.kernels.native import MAX_GROUP, Matrix

if TYPE_CHECKING:
    from vivace.core.model import Decoder, Layer

Pointers = ctypes.Array[c_void_p]


def why_no_span(c: ModelConfig) -> str | None:
    """Return why layers run one by one on native kernels and not several in one call, or None where they do not."""
    if c.group > MAX_GROUP:
        return f"more than {MAX_GROUP} query heads share a key/value head"
    if len({rope.width or c.head_dim for rope in c.ropes}) > 1:
        return "its rotary embeddings rotate different parts of a head"
    if c.width % 2 or c.ffn_width % 2 or c.num_heads * c.head_dim % 2:
        return "a width is odd"
    if c.moe is not None and (c.moe.expert_width % 2 or not c.gated):
        return "its experts have an odd width, or no gate"
    return None


def fetches_nothing(decoder: Decoder) -> bool:
    """Return whether all experts of a decoder are in memory, packed."""
    mixtures = [layer for index, layer in enumerate(decoder.layers) if decoder.config.is_moe(index)]
    return all(experts_of(layer.feed_forward) is not None for layer in mixtures)


def experts_of(feed: object) -> list[PackedFeedForward] | None:
    """Return the experts of a mixture, or None where they are fetched."""
    if not isinstance(feed, PackedMixture) or not isinstance(feed.experts, ResidentExperts):
        return None
    return [expert for expert in feed.experts if isinstance(expert, PackedFeedForward)]


def plan_of(decoder: Decoder, layers: Sequence[Layer], ropes: Sequence[int], kept: list[object]) -> CPlan:
    """Return a decoder's layers as a struct; ``ropes`` has the number of each layer's rotary embedding, and what the
    struct points into and no layer holds is added to ``kept``.
    """
    c = decoder.config
    table = (CLayer * len(layers))(*(layer_of(layer, rope, kept) for layer, rope in zip(layers, ropes, strict=True)))
    bias = None if decoder.relative is None else decoder.relative.by_distance
    kept.append(bias)
    return CPlan(
        layers=table,
        num_layers=len(layers),
        heads=c.num_heads,
        kv_heads=c.num_kv_heads,
        width=c.width,
        ffn_width=c.ffn_width,
        head_width=c.head_dim,
        rotated=(c.ropes[0].width or c.head_dim) if c.positions == "rotary" else 0,
        activation=ACTIVATIONS[c.activation],
        is_gated=c.gated,
        norms_heads_alone=c.qk_norm == "head",
        norm_eps=c.norm_eps,
        norm_offset=c.norm_offset,
        scale=c.scale,
        softcap=c.attention_softcap or 0.0,
        clip=0.0 if c.qkv_clip is None else float(torch.tensor(c.qkv_clip, dtype=decoder.dtype)),
        norms_sums=c.norm_placement == "sum",
        reads_sources=c.encoder is not None,
        bias=None if bias is None else bias.data_ptr(),
        bias_reach=0 if bias is None else bias.shape[1],
    )


def layer_of(layer: Layer, rope: int, kept: list[object], matrix: Callable[[object], CMatrix] | None = None) -> CLayer:
    """Return the weights of a layer as a struct; the structs that it points to are added to ``kept``."""
    around = (layer.attention_norm, layer.ffn_norm, layer.attention_post_norm, layer.ffn_post_norm)
    norms = (*around, layer.q_norm, layer.k_norm)
    feed = layer.feed_forward
    is_mixture = layer.config.is_moe(layer.index)
    gate = _NO_MATRIX if is_mixture or feed.gate is None else feed.gate
    halves = (gate, *((_NO_MATRIX,) * 2 if is_mixture else (feed.up, feed.down)))
    parts = (layer.qkv, layer.o, *halves)
    matrices = [part if isinstance(part, CMatrix) else (matrix or matrix_of)(part) for part in parts]
    window = layer.config.window(layer.index)
    mixture = mixture_of(feed, kept, matrix or matrix_of) if is_mixture else None
    cross = layer.cross
    sides = (_NO_MATRIX, _NO_MATRIX) if cross is None else tuple(map(matrix or matrix_of, (cross.q, cross.o)))
    beside = (None, None) if cross is None else (cross.norm, cross.sum_norm)
    gains = [gain_of(norm) for norm in (*norms, *beside)]
    return CLayer(*matrices, *gains[:6], window or 0, rope, mixture, *sides, *gains[6:])


def part_of(layer: Layer, name: str) -> object | None:
    """Return a projection of a layer by its name, or None where the layer has none of this name."""
    return getattr(layer if name in ("qkv", "o") else layer.feed_forward, name, None)


def pairs_of(feed: object) -> list[tuple[Any, Any]]:
    """Return the gate and the up projection of a feed-forward or of each expert of a mixture, where both are packed."""
    feeds = [feed] if (experts := experts_of(feed)) is None else experts
    found = [(getattr(each, "gate", None), getattr(each, "up", None)) for each in feeds]
    return [pair for pair in found if all(isinstance(getattr(part, "matrix", None), Matrix) for part in pair)]


def mixture_of(feed: object, kept: list[object], matrix: Callable[[object], CMatrix]) -> object:
    """Return a pointer to the struct of a mixture, or None where its experts are fetched."""
    experts = experts_of(feed)
    if experts is None:
        return None
    assert isinstance(feed, PackedMixture)
    structs = [CExpert(matrix(expert.gate), matrix(expert.up), matrix(expert.down)) for expert in experts]
    table = (CExpert * len(structs))(*structs)
    mixture = CMixture(feed.matrix.struct, table, feed.config.top_k, feed.config.normalise)
    kept += [table, mixture]
    return pointer(mixture)


_NO_MATRIX = CMatrix(None, None, LANES, LANES, FORMATS["tiles"], None, None)
"""Placeholder for a gate that a layer has not, and for the feed-forward of a layer with experts, which a native call
over it does not read."""


def matrix_of(part: object) -> CMatrix:
    """Return the weights of a packed projection as a struct."""
    multiplied = part.part if isinstance(part, SummedProjection) else part
    assert isinstance(multiplied, nn.Module)
    assert isinstance(multiplied.matrix, Matrix)
    return multiplied.matrix.struct


def gain_of(norm: nn.Module | None) -> CGain:
    """Return the weights of a norm as a struct, which is empty for no norm."""
    if norm is None:
        return CGain()
    assert isinstance(norm, NativeNorm)
    return CGain(norm.weight.data_ptr(), None if norm.bias is None else norm.bias.data_ptr())


def pointers(tensors: Sequence[Tensor]) -> Pointers:
    """Return the addresses of contiguous tensors; the caller must keep the tensors alive."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    return (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
