"""One file of a prompt cache: the keys, values and residuals of a stretch of a text, with all that they depend on.

    magic     8 bytes
    length    4 bytes, of the header
    checksum  4 bytes, CRC-32 of the header
    header    JSON: the model and the text in front, the stretch's own tokens, what follows and its CRC-32
    residuals (tokens, E), after the last layer
    entries   pool by pool, part by part, as blocks hold them (``core/blocks.py``)

A file is complete under its name or not there (``vivace.files.replacing``), and is never changed. Numbers are stored
as the machine has them; a file that another kind of machine wrote names another backend.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from vivace.errors import CorruptError, MismatchError

FORMAT = 1
"""Version of the layout; a file of another one is left alone."""
_MAGIC = b"vivaceKV"
_FIXED = struct.Struct("<8sII")
_LONGEST_HEADER = 1 << 20


@dataclass(frozen=True)
class BlockHeader:
    """What a file says of itself."""

    model: Mapping[str, str]
    """What bits depend on besides the text; two files with the same model may be used for each other."""
    above: str
    """Name of the stretch in front of it, or of what requests have to share before they share anything."""
    first: int
    """Place of its first token in the text."""
    tokens: tuple[int, ...]
    starts: tuple[int, ...]
    """For each pool of blocks, the first entry of the stretch that is stored: a sliding window may have passed some."""
    hidden_dtype: str
    hidden_width: int
    num_bytes: int
    """Of residuals and entries."""
    checksum: int
    """CRC-32 of them."""
    version: int = FORMAT

    @property
    def key(self) -> bytes:
        """Return the block's tokens, eight bytes each, by which it is found."""
        return array("q", self.tokens).tobytes()

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the residuals."""
        found = getattr(torch, self.hidden_dtype)
        assert isinstance(found, torch.dtype)
        return found


def bytes_of(parts: Sequence[Tensor]) -> list[memoryview]:
    """Return the bytes of tensors, without a copy where they are contiguous and on the CPU."""
    arrays = [part.cpu().contiguous().view(torch.uint8).numpy() for part in parts if part.numel()]
    return [memoryview(array).cast("B") for array in arrays]  # type: ignore[arg-type]


def checksum_of(parts: Sequence[memoryview]) -> int:
    """Return the CRC-32 of parts one behind the other."""
    found = 0
    for part in parts:
        found = zlib.crc32(part, found)
    return found


def encoded(header: BlockHeader) -> bytes:
    """Return everything that stands in front of the residuals."""
    text = json.dumps(asdict(header), separators=(",", ":")).encode()
    return _FIXED.pack(_MAGIC, len(text), zlib.crc32(text)) + text


def write_block(path: Path, header: BlockHeader, parts: Sequence[memoryview]) -> None:
    """Write a file, whose parts are those that the header's checksum is of.

    Raises:
        OSError: the disk is full, or may not be written.
    """
    with open(path, "wb", opener=_for_its_owner) as file:
        file.write(encoded(header))
        for part in parts:
            file.write(part)


def _for_its_owner(path: str, flags: int) -> int:
    """Open a file that only its owner may read, whatever the folder lets others do: prompts are in it."""
    return os.open(path, flags, 0o600)


def read_header(path: Path) -> BlockHeader:
    """Read what a file says of itself, and compare its size with that.

    Raises:
        CorruptError: it is cut short, or was changed.
        MismatchError: it has another version.
        OSError: it cannot be read, or is no longer there.
    """
    with path.open("rb") as file:
        return _header(file)


def read_block(path: Path, wanted: BlockHeader) -> bytearray:
    """Read residuals and entries of a file whose header was read before.

    Raises:
        CorruptError: it is cut short, or was changed, or its header is another one.
        OSError: it cannot be read, or is no longer there.
    """
    with path.open("rb") as file:
        if _header(file) != wanted:
            raise CorruptError("it is another block than it was")
        content = bytearray(wanted.num_bytes)
        if file.readinto(content) != wanted.num_bytes:
            raise CorruptError("it is cut short")
    if zlib.crc32(content) != wanted.checksum:
        raise CorruptError("its checksum is wrong")
    return content


def _header(file: BinaryIO) -> BlockHeader:
    """Read the header of an open file."""
    fixed = file.read(_FIXED.size)
    if len(fixed) < _FIXED.size:
        raise CorruptError("it is cut short")
    magic, length, checksum = _FIXED.unpack(fixed)
    if magic != _MAGIC or length > _LONGEST_HEADER:
        raise CorruptError("it is no block of a prompt cache")
    text = file.read(length)
    if zlib.crc32(text) != checksum:
        raise CorruptError("the checksum of its header is wrong")
    fields = json.loads(text)
    if fields.get("version") != FORMAT:
        raise MismatchError(f"it has version {fields.get('version')}, this is {FORMAT}")
    header = BlockHeader(**{**fields, "tokens": tuple(fields["tokens"]), "starts": tuple(fields["starts"])})
    position = file.tell()
    if file.seek(0, 2) != position + header.num_bytes:
        raise CorruptError("it is cut short")
    file.seek(position)
    return header
