"""A ``Decoder`` over the storage of a transformers module: the same memory, no copy.

Projections that transformers keeps apart are computed side by side (``SplitLinear``); stacks of experts and
transposed matrices are views. Training the module or moving it afterwards changes the decoder too only as long
as its parameters keep their storage.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from vivace.checkpoint.families import family_of, translate
from vivace.checkpoint.load import put
from vivace.checkpoint.names import Names, Target, TensorPiece, layout
from vivace.core.config import ModelConfig
from vivace.core.layers import Linear, SplitLinear
from vivace.core.model import Decoder
from vivace.core.parts import DenseParts
from vivace.errors import MismatchError


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
        if not c.is_moe(layer) and len(self.names.up) > 1:
            made.up = SplitLinear([Linear(c.width, c.ffn_width, bias=c.ffn_bias) for _ in self.names.up])
        return made


def share_module(hf_module: nn.Module) -> Decoder:
    """Return a decoder over the parameters of a causal language model of transformers.

    Args:
        hf_module: a model such as ``LlamaForCausalLM``; its ``config`` names its family.

    Raises:
        UnsupportedError: a family or setting is not supported.
        MismatchError: the module lacks parameters that its configuration implies.
    """
    raw = hf_config_of(hf_module)
    family, config = family_of(raw), translate(raw)
    names = family.names.packed() if config.moe is not None else family.names
    table = layout(names, config, names.roots[0], names.heads[0])
    theirs = dict(hf_module.named_parameters(remove_duplicate=False))
    missing = sorted({p.name for t in table.values() for p in t.pieces} - set(theirs))
    if missing:
        raise MismatchError(f"the module has no parameter {missing[0]} (quantised or wrapped modules cannot be shared)")
    with torch.device("meta"):
        decoder = Decoder(config, SplitParts(config, names))
    for ours, target in table.items():
        for place, piece in enumerate(target.pieces):
            put(decoder, _part(ours, target, place), _view(theirs[piece.name], piece))
    return decoder.eval()


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


def _view(parameter: nn.Parameter, piece: TensorPiece) -> torch.Tensor:
    """Return the parameter itself, or a view of its storage."""
    if piece.expert is None and not piece.transposed:
        return parameter
    values = parameter.detach() if piece.expert is None else parameter.detach()[piece.expert]
    return values.t() if piece.transposed else values
