"""Number formats that GGUF files are read in: blocks of codes with scales and offsets.

Nearly all formats are grids: a weight is ``scale * code + offset`` with an integer code, where 16 or 32 neighbouring
inputs share scale and offset. The layouts are facts of ggml's repository (``ggml/src/ggml-common.h`` and
``ggml-quants.c``); ``d`` and ``m`` are float16.

    q4_0 q5_0 q8_0    32 codes of 4, 5 or 8 bits    d (q - 8), d (q - 16), d q
    q4_1 q5_1         32 codes of 4 or 5 bits       d q + m
    q2_k q4_k q5_k    256 codes of 2, 4 or 5 bits   (d s) q - (m t), s and t of 4 or 6 bits for each 16 or 32
    q3_k q6_k         256 codes of 3 or 6 bits      (d s) (q - 4), (d s) (q - 32), s of 6 or 8 bits for each 16
    iq4_nl            32 codes of 4 bits            d table[q]
    iq4_xs            256 codes of 4 bits           (d s) table[q], s of 6 bits for each 32

The products ``d s`` and ``d s q`` are exact in float32, so a decoded weight is rounded at most once, where an offset is
added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vivace.checkpoint.gguf.blocks import Bytes, Floats
from vivace.errors import CorruptError, UnsupportedError
from vivace.kernels.grid import Grid
from vivace.kernels.low_bit import TABLE

ROWS_BYTES = 1 << 22
"""Bytes of a tensor that are decoded at a time, which bounds the memory of float32 copies."""

Codes = npt.NDArray[np.int16]


@dataclass(frozen=True)
class CodeBlocks:
    """Blocks of codes, with a scale and an offset for each group of neighbours."""

    codes: Codes
    """(n, block) integers."""
    scales: Floats
    """(n, groups)."""
    offsets: Floats | None = None
    """(n, groups), or None for zeros."""
    units: Floats | None = None
    """(n, 1) what the scales of a block are integer multiples of, or None."""
    offset_units: Floats | None = None
    """The same of the offsets."""

    def dense(self) -> Floats:
        """Return the weights, (n, block) float32."""
        count, groups = self.scales.shape
        codes = self.codes.reshape(count, groups, -1).astype(np.float32)
        values = codes * self.scales[:, :, None]
        if self.offsets is not None:
            values += self.offsets[:, :, None]
        return values.reshape(count, -1)


@dataclass(frozen=True)
class Type:
    """One number format."""

    block: int
    """Number of values in a block."""
    block_bytes: int
    """Number of bytes that a block takes."""
    grid: Callable[[Bytes], CodeBlocks] | None = None
    """Turns blocks (n, block_bytes) into codes and scales; None for whole values."""
    dtype: torch.dtype | None = None
    """Dtype of whole values; None for a grid."""


def _half(blocks: Bytes, at: int) -> Floats:
    """Return a float16 of each block as float32, (n, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(part: Bytes) -> Bytes:
    """Return the codes of bytes (..., 16 or 32): all low halves, then all high halves."""
    return np.concatenate([part & 15, part >> 4], axis=-1)


def _fifth_bits(part: Bytes) -> Bytes:
    """Return bit i of four bytes (n, 4) at place i, (n, 32), as 16 or 0."""
    return np.unpackbits(part, axis=-1, bitorder="little") * np.uint8(16)


def _q4_0(b: Bytes) -> CodeBlocks:
    return CodeBlocks(_nibbles(b[:, 2:]).astype(np.int16) - 8, _half(b, 0))


def _q4_1(b: Bytes) -> CodeBlocks:
    return CodeBlocks(_nibbles(b[:, 4:]).astype(np.int16), _half(b, 0), _half(b, 2))


def _q5_0(b: Bytes) -> CodeBlocks:
    return CodeBlocks((_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])).astype(np.int16) - 16, _half(b, 0))


def _q5_1(b: Bytes) -> CodeBlocks:
    return CodeBlocks((_nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])).astype(np.int16), _half(b, 0), _half(b, 2))


def _q8_0(b: Bytes) -> CodeBlocks:
    return CodeBlocks(b[:, 2:].view(np.int8).astype(np.int16), _half(b, 0))


def _two_bits(part: Bytes) -> Bytes:
    """Return the codes of 64 bytes (n, 64): bits 0-1 of the first 32 bytes, then bits 2-3 of them, and so on."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes: Bytes = part.reshape(len(part), 2, 1, 32) >> shifts & np.uint8(3)
    return codes.reshape(len(part), 256)


def _q2_k(b: Bytes) -> CodeBlocks:
    scales, offsets = b[:, :16] & 15, b[:, :16] >> 4
    unit, less = _half(b, 80), -_half(b, 82)
    return CodeBlocks(_two_bits(b[:, 16:80]).astype(np.int16), unit * scales, less * offsets, unit, less)


def _q3_k(b: Bytes) -> CodeBlocks:
    high = b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # a set bit stands for 4
    codes = _two_bits(b[:, 32:96]).astype(np.int16) + 4 * high.reshape(len(b), 256) - 4
    low = np.concatenate([b[:, 96:104] & 15, b[:, 96:104] >> 4], axis=1)
    top = np.concatenate([b[:, 104:108] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    unit = _half(b, 108)
    return CodeBlocks(codes, unit * ((low | top << 4).astype(np.float32) - 32), units=unit)


def _six_bits(part: Bytes) -> tuple[Bytes, Bytes]:
    """Return the eight scales and eight offsets of six bits that twelve bytes (n, 12) hold."""
    first, second, last = part[:, :4], part[:, 4:8], part[:, 8:]
    scales = np.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=1)
    return scales, np.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=1)


def _q4_k(b: Bytes) -> CodeBlocks:
    scales, offsets = _six_bits(b[:, 4:16])
    codes = _nibbles(b[:, 16:].reshape(len(b), 4, 32)).reshape(len(b), 256)
    unit, less = _half(b, 0), -_half(b, 2)
    return CodeBlocks(codes.astype(np.int16), unit * scales, less * offsets, unit, less)


def _q5_k(b: Bytes) -> CodeBlocks:
    scales, offsets = _six_bits(b[:, 4:16])
    low = _nibbles(b[:, 48:].reshape(len(b), 4, 32)).reshape(len(b), 256)
    high = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(len(b), 256)
    unit, less = _half(b, 0), -_half(b, 2)
    return CodeBlocks((low | high << 4).astype(np.int16), unit * scales, less * offsets, unit, less)


def _q6_k(b: Bytes) -> CodeBlocks:
    low = _nibbles(b[:, :128].reshape(len(b), 2, 64)).reshape(len(b), 256)
    high = _two_bits(b[:, 128:192])
    codes = (low | high << 4).astype(np.int16) - 32
    unit = _half(b, 208)
    return CodeBlocks(codes, unit * b[:, 192:208].view(np.int8).astype(np.float32), units=unit)


_TABLE = np.array(TABLE, np.int16)


def _iq4_nl(b: Bytes) -> CodeBlocks:
    return CodeBlocks(_TABLE[_nibbles(b[:, 2:])], _half(b, 0))


def _iq4_xs(b: Bytes) -> CodeBlocks:
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    high = (np.ascontiguousarray(b[:, 2:4]).view(np.uint16) >> shifts & 3).astype(np.uint8)
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=2).reshape(len(b), 8)
    codes = _TABLE[_nibbles(b[:, 8:].reshape(len(b), 8, 16))].reshape(len(b), 256)
    unit = _half(b, 0)
    return CodeBlocks(codes, unit * ((low | high << 4).astype(np.float32) - 32), units=unit)


TYPES: Mapping[str, Type] = {
    "f32": Type(1, 4, dtype=torch.float32),
    "f16": Type(1, 2, dtype=torch.float16),
    "bf16": Type(1, 2, dtype=torch.bfloat16),
    "q4_0": Type(32, 18, _q4_0),
    "q4_1": Type(32, 20, _q4_1),
    "q5_0": Type(32, 22, _q5_0),
    "q5_1": Type(32, 24, _q5_1),
    "q8_0": Type(32, 34, _q8_0),
    "q2_k": Type(256, 84, _q2_k),
    "q3_k": Type(256, 110, _q3_k),
    "q4_k": Type(256, 144, _q4_k),
    "q5_k": Type(256, 176, _q5_k),
    "q6_k": Type(256, 210, _q6_k),
    "iq4_nl": Type(32, 18, _iq4_nl),
    "iq4_xs": Type(256, 136, _iq4_xs),
}
"""All number formats that are read, by name."""

_CODES: Mapping[int, str] = {
    **{0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 9: "q8_1", 10: "q2_k", 11: "q3_k"},
    **{12: "q4_k", 13: "q5_k", 14: "q6_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s"},
    **{20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64"},
    **{29: "iq1_m", 30: "bf16", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4"},
}
"""Name of each ``ggml_type``, also of those that are not read."""


def find_type(code: int, what: str) -> str:
    """Return the name of a number format that is read.

    Args:
        code: its ``ggml_type``.
        what: the tensor, for the message.

    Raises:
        UnsupportedError: tensors of this format are not read.
        CorruptError: there is no such format.
    """
    name = _CODES.get(code, "")
    if name in TYPES:
        return name
    if not name:
        raise CorruptError(f"{what} has the unknown type {code}; the file is damaged or newer than this version")
    raise UnsupportedError(f"{what} is {name.upper()}, which is not read; read are {', '.join(TYPES)}")


def decode(raw: Bytes, shape: tuple[int, ...], name: str, what: str, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values of a tensor.

    Args:
        raw: its bytes.
        shape: its shape.
        name: its number format.
        what: the tensor, for messages.
        dtype: dtype of the result; None is float32 for grids. Whole values keep theirs and are not copied.

    Raises:
        CorruptError: a scale is not a finite number.
    """
    kind = TYPES[name]
    if kind.grid is None:
        assert kind.dtype is not None
        return torch.frombuffer(raw, dtype=kind.dtype).view(shape)
    values = torch.empty(len(raw) // kind.block_bytes, kind.block, dtype=dtype or torch.float32)
    for first, found in _decoded(raw, kind, f"{what}: a scale of the {name} weights"):
        values[first : first + len(found.codes)] = torch.from_numpy(found.dense())
    return values.view(shape)


def grid_of(raw: Bytes, shape: tuple[int, ...], name: str, what: str) -> Grid | None:
    """Return the codes of a matrix with their scales, as the file has them; None for whole values.

    Args:
        raw: its bytes.
        shape: (out, in).
        name: its number format.
        what: the matrix, for messages.

    Raises:
        CorruptError: a scale is not a finite number.
    """
    kind = TYPES[name]
    if kind.grid is None:
        return None
    codes = torch.empty(len(raw) // kind.block_bytes, kind.block, dtype=torch.int8)
    parts: dict[str, list[Tensor]] = {}
    for first, found in _decoded(raw, kind, f"{what}: a scale of the {name} weights"):
        codes[first : first + len(found.codes)] = torch.from_numpy(found.codes.astype(np.int8))
        for part in ("scales", "offsets", "units", "offset_units"):
            if (numbers := getattr(found, part)) is not None:
                parts.setdefault(part, []).append(torch.from_numpy(np.ascontiguousarray(numbers)))
    rows = {part: torch.cat(each).view(shape[0], -1) for part, each in parts.items()}
    scales = rows.pop("scales")
    return Grid(codes.view(shape), scales, shape[1] // scales.shape[1], **rows)


def _decoded(raw: Bytes, kind: Type, what: str) -> Iterator[tuple[int, CodeBlocks]]:
    """Yield the blocks of a tensor, some at a time, with the number of the first of them; raises as ``decode``."""
    assert kind.grid is not None
    blocks = raw.reshape(-1, kind.block_bytes)
    step = max(1, ROWS_BYTES // kind.block_bytes)
    for first in range(0, len(blocks), step):
        found = kind.grid(blocks[first : first + step])
        if not (np.isfinite(found.scales).all() and (found.offsets is None or np.isfinite(found.offsets).all())):
            raise CorruptError(f"{what} is infinite or not a number; the file is damaged")
        yield first, found
