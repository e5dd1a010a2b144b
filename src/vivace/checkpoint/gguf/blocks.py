"""Number formats of GGUF files: whole values, or blocks of 32 values that share a scale.

    f32, f16, bf16   one value after the other
    q8_0             32 x 8 bits, x = d q,        d = max |x| / 127
    q4_0             32 x 4 bits, x = d (q - 8),  d = m / -8, m the value of the largest magnitude

The scale d is stored as float16, so a block of q8_0 takes 34 bytes and one of q4_0 18. Values are rounded like in the
format's reference implementation (ggml, ``quantize_row_*_ref``), so that the files are those its tools would write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vivace.errors import ConfigError, UnsupportedError, nearest

BLOCK = 32
"""Number of values that share a scale."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Kind:
    """One number format."""

    name: str
    code: int
    """Its ``ggml_type``, written in the entry of each tensor."""
    file_code: int
    """The ``general.file_type`` of a file whose matrices have this format."""
    block: int
    """Number of values in a block."""
    block_bytes: int
    """Number of bytes that a block takes."""

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the number of bytes that a tensor of this shape takes.

        Raises:
            UnsupportedError: the rows are not a whole number of blocks.
        """
        if shape[-1] % self.block:
            raise UnsupportedError(
                f"rows of {shape[-1]} values cannot be {self.name}, whose blocks have {self.block}; choose bf16"
            )
        return int(np.prod(shape)) // self.block * self.block_bytes


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("f32", 0, 0, 1, 4),
        Kind("f16", 1, 1, 1, 2),
        Kind("bf16", 30, 32, 1, 2),
        Kind("q8_0", 8, 7, BLOCK, 2 + BLOCK),
        Kind("q4_0", 2, 2, BLOCK, 2 + BLOCK // 2),
    )
}
"""All formats by name."""


def find_kind(name: str) -> Kind:
    """Return the format of that name.

    Raises:
        ConfigError: there is no such format; the message names the nearest.
    """
    if name not in KINDS:
        raise ConfigError(f"GGUF type {name!r} is not written here{nearest(name, KINDS)}")
    return KINDS[name]


def encode(values: Tensor, kind: Kind) -> Bytes:
    """Return the stored bytes of a tensor; its last dimension is the one that is cut into blocks.

    Args:
        values: (..., n) of any floating dtype, n a multiple of ``kind.block``.
        kind: the format.

    Raises:
        UnsupportedError: a value or a scale is outside the range of float16, or a value is not finite where blocks of
            codes are written.
    """
    if kind.name == "bf16":
        return _raw(values.to(torch.bfloat16).contiguous().view(torch.int16).numpy())
    floats = values.to(torch.float32).contiguous().numpy()
    if kind.block > 1 and not np.isfinite(floats).all():
        raise UnsupportedError(f"a weight is infinite or not a number, which {kind.name} cannot hold")
    match kind.name:
        case "f32":
            return _raw(floats)
        case "f16":
            return _raw(_half(floats))
        case "q8_0":
            return _q8_0(floats.reshape(-1, BLOCK))
    return _q4_0(floats.reshape(-1, BLOCK))


def _q8_0(blocks: Floats) -> Bytes:
    """Encode blocks (n, 32) as q8_0: the scale, then 32 signed bytes."""
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = (blocks * _inverse(scale)).astype(np.float64)
    codes = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled).astype(np.int8)  # halves away from zero
    return np.concatenate([_raw(_half(scale)).reshape(-1, 2), codes.view(np.uint8)], axis=1).reshape(-1)


def _q4_0(blocks: Floats) -> Bytes:
    """Encode blocks (n, 32) as q4_0: the scale, then 16 bytes, value i in the low half of byte i and value i + 16 in
    the high.
    """
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    scale = largest / np.float32(-8)
    codes = np.minimum(15, (blocks * _inverse(scale) + np.float32(8.5)).astype(np.uint8))
    low, high = codes[:, : BLOCK // 2], codes[:, BLOCK // 2 :]
    return np.concatenate([_raw(_half(scale)).reshape(-1, 2), low | high << 4], axis=1).reshape(-1)


def _inverse(scale: Floats) -> Floats:
    """Return 1 / scale, and 0 where the scale becomes 0 in float16, since every value of that block then reads as 0."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=np.abs(scale) > 2.0**-25)


def _half(values: Floats) -> npt.NDArray[np.float16]:
    """Round values to float16.

    Raises:
        UnsupportedError: a finite value becomes infinite.
    """
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if np.isinf(half).any() and np.isfinite(values).all():
        raise UnsupportedError(
            f"a weight or scale of {np.abs(values).max():.4g} is beyond float16's 65504; choose bf16 or f32"
        )
    return half


def _raw(values: npt.NDArray[np.generic]) -> Bytes:
    """Return the bytes of an array."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
