"""A ``Decoder`` over the storage of a transformers module: the same memory where the layout allows it.

``share_module`` copies nothing. Projections that transformers keeps apart are computed side by side (``SplitLinear``);
stacks of experts and transposed matrices are views. Training the module or moving it afterwards changes the decoder
too, but only as long as its parameters keep their storage.

``pack_module`` lays out the matrices for a backend, which takes memory of its own, and shares the embedding, the norms
and the biases. Whoever keeps its decoder has to notice changes of the module (``Fingerprint``).
"""

from __future__ import annotations

import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from vivace.checkpoint.families import family_of, translate
from vivace.checkpoint.load import fused, pack_parts, put
from vivace.checkpoint.names import Names, Target, TensorPiece, layout
from vivace.core.backend import Backend
from vivace.core.config import ModelConfig
from vivace.core.cross import CrossAttention
from vivace.core.layers import Linear, SplitLinear
from vivace.core.model import Decoder
from vivace.core.parts import DenseParts, Parts
from vivace.errors import MismatchError
from vivace.kernels.library import open_library

PAGE = 4096
"""Bytes that have one checksum."""
SUMMED_BYTES = 4 << 20
"""Bytes that one thread sums at a time."""


class SplitParts(DenseParts):
    """Builds projections as several modules where the family stores several tensors."""

    def __init__(self, config: ModelConfig, names: Names) -> None:
        super().__init__(config)
        self.names = names

    def projection(self, layer: int, site: str) -> nn.Module:
        """Return the module of a site; "qkv" is three projections where the family stores three tensors."""
        c = self.config
        if site == "qkv" and len(self.names.qkv) > 1:
            rows = (c.num_heads * c.head_dim, *(c.num_kv_heads * c.head_dim,) * 2)
            return SplitLinear([Linear(c.width, size, bias=c.qkv_bias) for size in rows])
        return super().projection(layer, site)

    def feed_forward(self, layer: int) -> nn.Module:
        """Return the feed-forward of a layer, with gate and up as two projections where the family stores two
        tensors.
        """
        made = super().feed_forward(layer)
        c = self.config
        if not c.is_moe(layer) and len(self.names.up) > 1 and (c.gated or not self.names.up_plain):
            made.up = SplitLinear([Linear(c.width, c.ffn_width, bias=c.ffn_bias) for _ in self.names.up])
        return made

    def cross(self, layer: int) -> CrossAttention | None:
        """Return what reads a source, with keys and values as two projections."""
        made, c = super().cross(layer), self.config
        if made is not None and c.encoder is not None:
            keys = c.num_kv_heads * c.head_dim
            made.kv = SplitLinear([Linear(c.encoder.width, keys, bias=c.qkv_bias) for _ in self.names.cross_kv])
        return made

    def encoder(self) -> Parts | None:
        """Return the same for the encoder."""
        if self.config.encoder is None:
            return None
        assert self.names.encoder is not None
        return SplitParts(self.config.encoder, self.names.encoder)


def share_module(hf_module: nn.Module) -> Decoder:
    """Return a decoder over the parameters of a causal language model of transformers.

    Args:
        hf_module: a model such as ``LlamaForCausalLM``; its ``config`` names its family.

    Raises:
        UnsupportedError: a family or setting is not supported.
        MismatchError: the module lacks parameters that its configuration implies.
    """
    config, names, table, theirs = _parameters(hf_module)
    with torch.device("meta"):
        decoder = Decoder(config, SplitParts(config, names))
    for ours, target in table.items():
        for place, piece in enumerate(target.pieces):
            put(decoder, _part(ours, target, place), _view(theirs[piece.name], piece))
    decoder.tie()
    return decoder.eval()


def pack_module(hf_module: nn.Module, backend: Backend, dtype: torch.dtype) -> Decoder:
    """Return a decoder with the weights of a causal language model of transformers, laid out for a backend.

    Args:
        hf_module: as for ``share_module``, all of its parameters of one dtype.
        backend: takes over each layer as soon as its weights are collected, so that never more than one layer is in
            memory a third time.
        dtype: of the decoder.

    Raises:
        UnsupportedError: a family or setting is not supported, or the backend cannot run such a decoder.
        MismatchError: the module lacks parameters that its configuration implies.
    """
    config, _, table, theirs = _parameters(hf_module)

    def read(name: str) -> Tensor:
        target = table[name]
        return fused(target, [theirs[piece.name].detach() for piece in target.pieces], dtype, torch.device("cpu"))

    with torch.device("meta"):
        decoder = Decoder(config, backend=backend)
    pack_parts(decoder, read)
    return decoder.requires_grad_(False).eval()


def _parameters(hf_module: nn.Module) -> tuple[ModelConfig, Names, dict[str, Target], dict[str, nn.Parameter]]:
    """Return a module's configuration, its family's names, what fills our parameters, and its own by name."""
    raw = hf_config_of(hf_module)
    family, config = family_of(raw), translate(raw)
    names = family.names.packed() if config.moe is not None else family.names
    table = layout(names, config, names.roots[0], names.heads[0])
    theirs = dict(hf_module.named_parameters(remove_duplicate=False))
    theirs |= {name: nn.Parameter(buffer, requires_grad=False) for name, buffer in hf_module.named_buffers()}
    missing = sorted({p.name for t in table.values() for p in t.pieces} - set(theirs))
    if missing:
        raise MismatchError(f"the module has no parameter {missing[0]} (quantised or wrapped modules cannot be shared)")
    return config, names, table, theirs


class Fingerprint:
    """What the parameters of a module were at one time.

    PyTorch counts changes of a parameter in place, and the count is compared first. It leaves out those of
    ``parameter.data``, by which LoRA weights are merged and some checkpoints are loaded, so the CRC-32 of all pages is
    compared too. That costs about as much as one pass of the model, which reads the weights once as well.
    """

    def __init__(self, hf_module: nn.Module) -> None:
        """Look at all parameters of a module, which are on the CPU."""
        self._changes, self._sums = _changes(hf_module), _sums(hf_module)

    def is_of(self, hf_module: nn.Module) -> bool:
        """Return whether the parameters of a module have these values still."""
        return self._changes == _changes(hf_module) and self._sums == _sums(hf_module)


def _changes(hf_module: nn.Module) -> list[int | None]:
    """Return how often each parameter was changed in place."""
    return [None if p.is_inference() else p._version for p in hf_module.parameters()]


def _sums(hf_module: nn.Module) -> list[int]:
    """Return checksums of all parameters, computed by as many threads as PyTorch has."""
    values = [p.detach().contiguous().view(-1).view(torch.uint8) for p in hf_module.parameters()]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(_sum_of, (part for each in values for part in each.split(SUMMED_BYTES))))


def _sum_of(part: Tensor) -> int:
    """Return a checksum of some bytes: of the checksums of whole pages and of what follows them."""
    sums = torch.empty(len(part) // PAGE, dtype=torch.int32)
    open_library().vivace_page_sums(part.data_ptr(), len(sums), sums.data_ptr(), 0)
    return zlib.crc32(part[len(sums) * PAGE :].numpy().data, zlib.crc32(sums.numpy().data))


def hf_config_of(hf_module: nn.Module) -> dict[str, Any]:
    """Return the ``config.json`` that transformers would write for a module."""
    config: Any = hf_module.config
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    return found


def _part(ours: str, target: Target, place: int) -> str:
    """Return the name of the module parameter that a piece of one of our parameters becomes."""
    if len(target.pieces) == 1:
        return ours
    stem, _, leaf = ours.rpartition(".")
    return f"{stem}.parts.{place}.{leaf}"


def _view(parameter: nn.Parameter, piece: TensorPiece) -> Tensor:
    """Return the parameter itself, or a view of its storage."""
    if piece.expert is None and not piece.transposed:
        return parameter
    values = parameter.detach() if piece.expert is None else parameter.detach()[piece.expert]
    return values.t() if piece.transposed else values
