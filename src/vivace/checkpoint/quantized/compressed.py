"""compressed-tensors, as llm-compressor writes it.

``format`` says how a matrix (out, in) is stored:

    pack-quantized   weight_packed int32 (out, in b / 32), codes plus 2^(b - 1), lowest bits first; weight_shape;
                     weight_scale (out, groups); weight_zero_point int32 (out b / 32, groups), packed along outputs
    int-quantized    weight int8; weight_scale (out, groups); weight_zero_point int8 (out, groups)
    float-quantized  weight float8_e4m3fn; weight_scale for the matrix, each output, or each block
    naive-quantized  one of the two above

and a weight is ``scale (code - zero)``. ``mixed-precision`` names a format in each of its ``config_groups``; the stored
tensors tell which. Groups are those of the scales: one for the matrix, for each output, or for each so many inputs.
Where ``weight_g_idx`` says that inputs were ordered by activation, they are taken in that order. Settings that quantize
activations change no weight, and are not applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vivace.checkpoint.quantized.fp8 import scaled
from vivace.checkpoint.quantized.parts import WORD, StoredParts, agree, block_of, finite, number_of, one_of, unpacked
from vivace.errors import CorruptError, UnsupportedError
from vivace.kernels.grid import Grid

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
"""Formats that are read."""
PACKED_BITS = (4, 8)
"""Widths of packed codes that are read."""


class CompressedTensors:
    """Reads the matrices of one checkpoint."""

    mark = ".weight_scale"
    names = frozenset(
        {".weight", ".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx"}
        | {".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point"}
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Take the settings of a ``quantization_config``.

        Raises:
            UnsupportedError: a setting is not read.
        """
        formats = [one_of(config, "format", FORMATS)]
        groups = config.get("config_groups") or {}
        if not isinstance(groups, Mapping):
            raise UnsupportedError("quantization_config has config_groups that are no object of groups by name")
        self._weights = [each.get("weights") or {} for each in groups.values() if isinstance(each, Mapping)]
        formats += [
            one_of(each, "format", FORMATS)
            for each in groups.values()
            if isinstance(each, Mapping) and each.get("format")
        ]
        if config.get("kv_cache_scheme"):
            raise UnsupportedError(
                "quantization_config has a kv_cache_scheme, which is not read; take it out of config.json and choose "
                "the precision of the cache when loading"
            )
        if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise UnsupportedError("quantization_config has a sparsity_config, which is not read")
        if config.get("transform_config"):
            raise UnsupportedError("quantization_config has a transform_config (rotated weights), which is not read")
        blocks = [block_of(each["block_structure"]) for each in self._weights if each.get("block_structure")]
        self._block = blocks[0] if blocks else None

    def shape(self, stored: StoredParts) -> tuple[int, ...]:
        """Return the shape (out, in) of a matrix."""
        if ".weight_packed" in stored.names:
            out, width = stored.tensor(".weight_shape").tolist()
            return int(out), int(width)
        return stored.shape(".weight")

    def kind(self, stored: StoredParts) -> str:
        """Return the number format of a matrix."""
        if ".weight_packed" in stored.names:
            return f"packed-{self._bits(stored)}"
        return "fp8" if stored.tensor(".weight").dtype == torch.float8_e4m3fn else "int8"

    def _bits(self, stored: StoredParts) -> int:
        """Return the bits of a packed code: the width of the configuration with which as many words are filled."""
        width, words = self.shape(stored)[1], stored.shape(".weight_packed")[1]
        known = sorted({int(each["num_bits"]) for each in self._weights if "num_bits" in each})
        found = [bits for bits in known if -(-width * bits // WORD) == words]
        if not found:
            agree(False, stored, f"{words} words do not hold {width} codes of {' or '.join(map(str, known))} bits")
        if found[0] not in PACKED_BITS:
            read = " and ".join(map(str, PACKED_BITS))
            raise UnsupportedError(f"{stored.stem} has packed codes of {found[0]} bits; read are {read}")
        return found[0]

    def read(self, stored: StoredParts) -> Grid | Tensor:
        """Return a matrix."""
        scales = finite(stored.tensor(".weight_scale"), f"{stored.stem}.weight_scale")
        if ".weight_packed" in stored.names:
            return self._packed(stored, scales)
        weight = stored.tensor(".weight")
        if weight.dtype == torch.float8_e4m3fn:
            return scaled(weight, scales, self._block, stored)
        agree(weight.dtype == torch.int8, stored, f"weight is {weight.dtype} where int8 or float8_e4m3fn is expected")
        has_zeros = ".weight_zero_point" in stored.names
        return self._grid(stored, weight, scales, stored.tensor(".weight_zero_point").float() if has_zeros else None)

    def _packed(self, stored: StoredParts, scales: Tensor) -> Grid:
        """Return a matrix of packed codes."""
        out, width = self.shape(stored)
        bits = self._bits(stored)
        agree(stored.shape(".weight_packed")[0] == out, stored, f"weight_packed does not have {out} outputs")
        half = 1 << bits - 1
        codes = (unpacked(stored.tensor(".weight_packed"), bits, width) ^ half).view(torch.int8)
        if bits < 8:
            codes = (codes << 8 - bits) >> 8 - bits  # the sign of a narrow code
        zeros = None
        if ".weight_zero_point" in stored.names:
            words = stored.tensor(".weight_zero_point")
            zeros = unpacked(words.t(), bits, out).t().float() - half
        return self._grid(stored, codes, scales, zeros)

    def _group(self, stored: StoredParts, width: int, count: int) -> int:
        """Return the number of inputs of a group, of which the configuration names one or several sizes; the last group
        may have fewer.
        """
        agree(count > 0, stored, "there are no scales")
        sizes = {number_of(each, "group_size", 0) for each in self._weights if each.get("group_size")}
        sizes = {size for size in sizes if size > 0}
        fitting = sorted(size for size in sizes if -(-width // size) == count)
        if count == 1 or not sizes:
            agree(width % count == 0, stored, "scales do not fit the matrix")
            return width // count
        agree(len(fitting) == 1, stored, f"{count} scales an output are no groups of {sorted(sizes)} of {width} inputs")
        return fitting[0]

    def _grid(self, stored: StoredParts, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Grid:
        """Return codes with their scales, which are for the matrix, each output, or groups of inputs."""
        out, width = codes.shape
        if scales.numel() == 1:
            scales = scales.view(1, 1).expand(out, 1)
            zeros = None if zeros is None else zeros.view(1, 1).expand(out, 1)
        scales = scales.view(out, -1) if scales.dim() == 1 and len(scales) == out else scales
        count = scales.shape[-1]
        agree(scales.dim() == 2 and len(scales) == out, stored, "scales do not fit the matrix")
        group = self._group(stored, width, count)
        if zeros is not None:
            zeros = zeros.view(out, -1) if zeros.dim() == 1 else zeros
            agree(zeros.shape == scales.shape, stored, "zero points do not fit scales")
            least, most = -128, 127
            if bool(((zeros < least) | (zeros > most)).any()):
                raise CorruptError(f"{stored.stem}.weight_zero_point is beyond {least}..{most}")
        scales = scales.contiguous()
        if ".weight_g_idx" not in stored.names:
            return Grid(codes, scales, group, zeros)
        index = stored.tensor(".weight_g_idx").long()
        if bool((index < 0).all()):  # -1: not ordered
            return Grid(codes, scales, group, zeros)
        order = torch.argsort(index, stable=True)
        if not torch.equal(index[order], torch.arange(width) // group):
            raise CorruptError(f"{stored.stem}.weight_g_idx does not divide {width} inputs into {count} groups")
        return Grid(codes[:, order].contiguous(), scales, group, zeros, order=order)
