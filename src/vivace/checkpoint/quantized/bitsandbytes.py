"""bitsandbytes: four bits as a table of sixteen numbers (nf4 and fp4), and eight-bit integers.

Four bits (Dettmers et al., *QLoRA*, 2023, arXiv:2305.14314). ``weight`` holds two codes a byte, the earlier one in the
high half; ``weight.quant_map`` is the table, ``weight.absmax`` a factor for each block of neighbouring weights, and
``weight.quant_state.bitsandbytes__nf4`` JSON with the shape and the size of blocks. With nested (double) quantization
``absmax`` is itself a byte for a table of 256, times ``weight.nested_absmax``, plus an offset. The tables are not
evenly spaced, so these weights are no grid and are decoded where they are read.

Eight bits (Dettmers et al., *LLM.int8()*, 2022, arXiv:2208.07339). ``weight`` is int8 (out, in), and ``SCB`` the
largest magnitude of each output, which 127 stands for. Which inputs are multiplied in 16 bits is decided while running,
and changes no weight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vivace.checkpoint.quantized.parts import StoredParts, agree, finite
from vivace.errors import CorruptError
from vivace.kernels.grid import Grid

_STATE = ".weight.quant_state.bitsandbytes__"
_AT_ONCE = 1 << 22


class FourBits:
    """Reads the matrices of one checkpoint in nf4 or fp4."""

    mark = ".weight.absmax"
    names = frozenset(
        {".weight", ".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map"}
        | {f"{_STATE}nf4", f"{_STATE}fp4"}
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Take a ``quantization_config``, all of whose settings stand beside the weights too."""

    def shape(self, stored: StoredParts) -> tuple[int, ...]:
        """Return the shape of a matrix."""
        return tuple(self._state(stored)["shape"])

    def kind(self, stored: StoredParts) -> str:
        """Return the number format of a matrix."""
        return str(self._state(stored)["quant_type"])

    def read(self, stored: StoredParts) -> Tensor:
        """Return a matrix in float32."""
        state = self._state(stored)
        shape, block = tuple(state["shape"]), int(state["blocksize"])
        count = shape[0] * shape[1]
        raw = stored.tensor(".weight").contiguous().view(torch.uint8).flatten()
        table = finite(stored.tensor(".weight.quant_map"), f"{stored.stem}.weight.quant_map")
        largest = self._largest(stored, state)
        fits = len(raw) == -(-count // 2) and table.shape == (16,) and len(largest) == -(-count // block)
        agree(fits and block % 2 == 0, stored, f"they are no matrix {list(shape)} in blocks of {block}")
        values = torch.empty(2 * len(raw))
        step = _AT_ONCE // block * block
        for first in range(0, 2 * len(raw), step):
            part = raw[first // 2 : (first + step) // 2]
            numbers = table[torch.stack((part >> 4, part & 15), 1).flatten().int()]
            factors = largest[first // block : (first + step) // block].repeat_interleave(block)[: len(numbers)]
            values[first : first + step] = numbers * factors
        return values[:count].view(shape)

    def _state(self, stored: StoredParts) -> Mapping[str, Any]:
        """Return the JSON beside a matrix.

        Raises:
            CorruptError: there is none, or it is not readable.
        """
        found = [name for name in stored.names if name.startswith(_STATE)]
        if not found:
            raise CorruptError(f"{stored.stem}.weight has no quant_state.bitsandbytes__nf4 or __fp4")
        try:
            state = json.loads(bytes(stored.tensor(found[0]).tolist()))
            shape, _ = [int(size) for size in state["shape"]], int(state["blocksize"])
        except (ValueError, KeyError, TypeError, UnicodeDecodeError) as exc:
            raise CorruptError(f"{stored.stem}{found[0]} is not readable: {exc}") from exc
        if len(shape) != 2:
            raise CorruptError(f"{stored.stem}{found[0]} describes a tensor of shape {shape}, not a matrix")
        checked: Mapping[str, Any] = {**state, "quant_type": found[0].removeprefix(_STATE)}
        return checked

    def _largest(self, stored: StoredParts, state: Mapping[str, Any]) -> Tensor:
        """Return the factor of each block."""
        found = stored.tensor(".weight.absmax").flatten()
        if ".weight.nested_absmax" not in stored.names:
            return finite(found, f"{stored.stem}.weight.absmax")
        table = finite(stored.tensor(".weight.nested_quant_map"), f"{stored.stem}.weight.nested_quant_map")
        factors = finite(stored.tensor(".weight.nested_absmax"), f"{stored.stem}.weight.nested_absmax").flatten()
        block = int(state["nested_blocksize"])
        fits = found.dtype == torch.uint8 and len(table) == 256 and len(factors) == -(-len(found) // block)
        agree(fits, stored, "nested factors do not fit each other")
        return table[found.int()] * factors.repeat_interleave(block)[: len(found)] + float(state["nested_offset"])


class EightBits:
    """Reads the matrices of one checkpoint in int8."""

    mark = ".SCB"
    names = frozenset({".weight", ".SCB", ".weight_format"})

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Take a ``quantization_config``, none of whose settings changes the weights."""

    def shape(self, stored: StoredParts) -> tuple[int, ...]:
        """Return the shape (out, in) of a matrix."""
        return stored.shape(".weight")

    def kind(self, stored: StoredParts) -> str:
        """Return the number format of a matrix."""
        return "bitsandbytes-8"

    def read(self, stored: StoredParts) -> Grid:
        """Return a matrix."""
        codes = stored.tensor(".weight")
        largest = finite(stored.tensor(".SCB"), f"{stored.stem}.SCB").flatten()
        agree(codes.dtype == torch.int8 and len(largest) == len(codes), stored, "they are no int8 matrix")
        if ".weight_format" in stored.names and int(stored.tensor(".weight_format").flatten()[0]) != 0:
            raise CorruptError(f"{stored.stem}.weight is in the order of another processor, not in rows")
        return Grid(codes, (largest / 127.0)[:, None], codes.shape[1])
