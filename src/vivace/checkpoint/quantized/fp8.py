"""Eight-bit floating point in blocks, as DeepSeek-V3 and Qwen3 are published (``quant_method: fp8``).

A matrix is ``weight`` float8_e4m3fn (out, in) with ``weight_scale_inv``, one number for each block of
``weight_block_size`` (128 x 128) outputs and inputs, which multiplies the block despite its name. Without blocks it has
one scale (``weight_scale`` or ``weight_scale_inv``) for the matrix or for each output (``quant_method: fbgemm_fp8``).
The numbers are no grid of integers, so they are decoded where they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vivace.checkpoint.quantized.parts import StoredParts, agree, block_of, finite, one_of

_SCALES = (".weight_scale_inv", ".weight_scale")


class Fp8:
    """Reads the matrices of one checkpoint."""

    names = frozenset({".weight", *_SCALES, ".input_scale", ".activation_scale", ".input_scale_ub"})

    def __init__(self, config: Mapping[str, Any], mark: str = ".weight_scale_inv") -> None:
        """Take the settings of a ``quantization_config`` and the name of the tensor of scales.

        Raises:
            UnsupportedError: a setting is not read.
        """
        one_of(config, "fmt", ("e4m3", None))
        self.mark = mark
        size = config.get("weight_block_size")
        self.block = None if size is None else block_of(size)

    def shape(self, stored: StoredParts) -> tuple[int, ...]:
        """Return the shape (out, in) of a matrix."""
        return stored.shape(".weight")

    def kind(self, stored: StoredParts) -> str:
        """Return the number format of a matrix."""
        return "fp8"

    def read(self, stored: StoredParts) -> Tensor:
        """Return a matrix in float32."""
        weight = stored.tensor(".weight")
        agree(weight.dtype == torch.float8_e4m3fn, stored, f"weight is {weight.dtype} where float8_e4m3fn is expected")
        found = stored.tensor(self.mark)
        agree(found.is_floating_point(), stored, f"scales are {found.dtype}, which are not read")
        scales = finite(found, stored.stem + self.mark)
        return scaled(weight, scales, self.block, stored)


def scaled(weight: Tensor, scales: Tensor, block: tuple[int, int] | None, stored: StoredParts) -> Tensor:
    """Return numbers (out, in) in float32, times one scale for the matrix, each output or each block."""
    out, width = weight.shape
    finite(weight, f"{stored.stem}.weight")
    if scales.numel() == 1:
        return weight.float() * scales.flatten()
    if scales.shape in ((out,), (out, 1)):
        return weight.float() * scales.view(out, 1)
    rows, columns = block or (0, 0)
    blocks = (-(-out // rows), -(-width // columns)) if rows and columns else ()
    agree(tuple(scales.shape) == blocks, stored, f"scales {list(scales.shape)} do not cover the matrix")
    wide = scales.repeat_interleave(columns, 1)[:, :width]
    values = torch.empty(out, width)
    for place, factors in enumerate(wide):
        part = slice(place * rows, (place + 1) * rows)
        values[part] = weight[part].float() * factors
    return values
