"""GGUF, the file format of llama.cpp: a header of typed keys, a table of tensors, then their bytes.

Version 3, little-endian, as described in ggml's repository (``docs/gguf.md``):

    "GGUF"  version u32  tensors u64  keys u64
    keys     name, type u32, value; strings and arrays with their length (u64) before them
    tensors  name, dimensions u32, sizes u64 innermost first, kind u32, offset u64 from the first byte of data
    data     every tensor at a multiple of 32 bytes

Tensors are encoded a few rows at a time while they are written, so memory does not grow with the size of the file.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from vivace.checkpoint.gguf.blocks import Kind, encode
from vivace.errors import CheckpointError
from vivace.files import replacing

Value = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
"""Value of a key. Integers are written as u32 (i32 in arrays), floats as f32."""

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_PART = 1 << 22
"""Number of values that are encoded at once."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file; its values are read when it is written."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    read: Callable[[], Tensor]
    """Returns the values, of the given shape."""


def write_gguf(path: str | Path, keys: Mapping[str, Value], entries: Sequence[Entry]) -> int:
    """Write a file, completely or not at all.

    Args:
        path: the file to write.
        keys: names and values of the header.
        entries: its tensors, in order.

    Returns:
        The size of the file in bytes.

    Raises:
        CheckpointError: the disk is full or may not be written; a previous file is left as it was.
        UnsupportedError: a tensor cannot be stored in its format.
    """
    header = _header(keys, entries)
    try:
        with replacing(path) as partial, partial.open("wb") as file:
            file.write(header)
            _pad(file)
            for entry in entries:
                _write(file, entry)
                _pad(file)
            file.flush()
            os.fsync(file.fileno())
            return file.tell()
    except OSError as exc:
        raise CheckpointError(f"{path} could not be written, and is as it was: {exc.strerror or exc}") from exc


def _header(keys: Mapping[str, Value], entries: Sequence[Entry]) -> bytes:
    """Return the header and the table of tensors, each with its offset into the data."""
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(entries), len(keys))]
    parts += [_string(name) + _typed(value) for name, value in keys.items()]
    offset = 0
    for entry in entries:
        sizes = entry.shape[::-1]
        parts.append(_string(entry.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
        parts.append(struct.pack("<IQ", entry.kind.code, offset))
        offset += _aligned(entry.kind.num_bytes(entry.shape))
    return b"".join(parts)


def _typed(value: Value) -> bytes:
    """Encode the type and the value of a key."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    assert value, "an empty array has no type"
    count = len(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", _ARRAY, _STRING, count) + b"".join(_string(str(item)) for item in value)
    kind, letter = (_I32, "i") if isinstance(value[0], int) else (_F32, "f")
    return struct.pack(f"<IIQ{count}{letter}", _ARRAY, kind, count, *value)


def _string(text: str) -> bytes:
    """Encode a string: its length in bytes, then UTF-8."""
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _write(file: BinaryIO, entry: Entry) -> None:
    """Encode the values of a tensor and write them, a few rows at a time."""
    values = entry.read()
    assert tuple(values.shape) == entry.shape, f"{entry.name} is {list(values.shape)}, not {list(entry.shape)}"
    start = file.tell()
    for part in values.split(max(1, _PART // max(1, values[0].numel()))):
        file.write(encode(part, entry.kind).data)
    assert file.tell() - start == entry.kind.num_bytes(entry.shape)


def _pad(file: BinaryIO) -> None:
    """Write zeros up to the next multiple of ``ALIGNMENT``."""
    file.write(bytes(_aligned(file.tell()) - file.tell()))


def _aligned(offset: int) -> int:
    """Round an offset up to the next multiple of ``ALIGNMENT``."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
