"""The file of matrices in four bits: codes and scales of the parts of each layer, by name.

``layers.3.qkv.codes`` is (out, groups * 32) uint8, the code of an even input in the low half of its byte, and
``layers.3.qkv.scales`` is (out, groups) bfloat16. Parts are ``qkv``, ``o``, ``gate``, ``up`` and ``down``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vivace.core.model import Decoder
from vivace.errors import MismatchError
from vivace.kernels.low_bit import GROUP, LowBit, q4_of
from vivace.kernels.native import Matrix

Part = tuple[int, str]
"""A layer, and the name of one of its projections."""


def tensors_of(part: Part, codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a part by name, from a code for each weight (out, groups * 64) and scales (out, groups)."""
    name = f"layers.{part[0]}.{part[1]}"
    return {f"{name}.codes": codes[:, ::2] | codes[:, 1::2] << 4, f"{name}.scales": scales}


def copies_of(model: Decoder, tensors: Mapping[str, Tensor]) -> dict[Part, LowBit]:
    """Return the matrices of a file as drafts read them, by layer and part.

    Raises:
        MismatchError: they are not those of the model.
    """
    parts = {name.rpartition(".")[0] for name in tensors}
    return {_part_of(name): _copy(model, name, tensors) for name in sorted(parts)}


def _part_of(name: str) -> Part:
    match name.split("."):
        case ["layers", layer, part] if layer.isdecimal():
            return int(layer), part
    raise MismatchError(f"the quantized weights have a matrix {name!r}, which no layer has; make them again")


def _copy(model: Decoder, name: str, tensors: Mapping[str, Tensor]) -> LowBit:
    layer, part = _part_of(name)
    matrix = None
    if layer < len(model.layers):
        owner = model.layers[layer] if part in ("qkv", "o") else getattr(model.layers[layer], "feed_forward", None)
        matrix = getattr(getattr(owner, part, None), "matrix", None)
    codes, scales = tensors.get(f"{name}.codes"), tensors.get(f"{name}.scales")
    if not isinstance(matrix, Matrix) or codes is None or scales is None or codes.dtype != torch.uint8:
        raise MismatchError(f"the quantized weights of {name} do not fit this model; make them again")
    groups = -(-matrix.in_width // GROUP)
    if codes.shape != (matrix.out_width, groups * GROUP // 2) or scales.shape != (matrix.out_width, groups):
        raise MismatchError(f"the quantized weights of {name} do not fit this model; make them again")
    whole = torch.stack((codes & 15, codes >> 4), 2).flatten(1)
    return q4_of(whole, scales.to(torch.bfloat16), matrix.in_width)
