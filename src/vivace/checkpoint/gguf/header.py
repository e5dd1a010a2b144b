"""Reading the header and the table of tensors of a GGUF file (versions 2 and 3, little-endian; ``file.py`` shows the
layout).

Every length in the file is compared with what is left of it before anything is read, so that a truncated or damaged
file is one clear error.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from vivace.checkpoint.gguf.decoding import TYPES, find_type
from vivace.checkpoint.gguf.file import ALIGNMENT, MAGIC
from vivace.errors import CorruptError, NotFoundError, UnsupportedError
from vivace.units import format_bytes

VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class StoredEntry:
    """One tensor in a file."""

    type: str
    """Its number format, a key of ``decoding.TYPES``."""
    shape: tuple[int, ...]
    """Sizes, the innermost last."""
    start: int
    """Its first byte in the file."""
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """What a file says about itself."""

    path: Path
    version: int
    keys: Mapping[str, Any]
    """Metadata by name: numbers, strings, booleans and lists of them."""
    tensors: Mapping[str, StoredEntry]


def read_header(path: Path) -> Header:
    """Read the metadata and the table of tensors of a file.

    Raises:
        NotFoundError: there is no such file.
        CorruptError: the file is truncated, or is no GGUF file.
        UnsupportedError: its version, byte order or a tensor's format is not read, or it is one part of several.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data).header()
    except FileNotFoundError as exc:
        raise NotFoundError(f"there is no file {path}") from exc
    except ValueError as exc:  # an empty file cannot be mapped
        raise CorruptError(f"{path} ({format_bytes(path.stat().st_size)}) is not a GGUF file") from exc
    except OSError as exc:
        raise CorruptError(f"{path} cannot be read: {exc.strerror or exc}") from exc


class _Cursor:
    """A place in a mapped file from which values are taken one after the other."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def header(self) -> Header:
        """Read everything before the bytes of the tensors."""
        if self._data[: len(MAGIC)] != MAGIC:
            raise CorruptError(f"{self._path} ({format_bytes(len(self._data))}) is not a GGUF file")
        self._at = len(MAGIC)
        (version,) = self._take("I")
        if version not in VERSIONS:
            is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            what = "big-endian" if is_swapped else f"GGUF version {version}"
            raise UnsupportedError(f"{self._path} is {what}; little-endian files of versions 2 and 3 are read")
        num_tensors, num_keys = self._take("QQ")
        keys = {}
        for _ in range(num_keys):
            name = self._text()
            keys[name] = self._value(*self._take("I"))
        if int(keys.get("split.count") or 1) > 1:
            raise UnsupportedError(
                f"{self._path} is one of {keys['split.count']} parts, which are not read; join them first "
                "(llama-gguf-split --merge)"
            )
        table = [self._entry() for _ in range(num_tensors)]
        alignment = int(keys.get("general.alignment") or ALIGNMENT)
        return Header(self._path, version, keys, self._placed(table, -(-self._at // alignment) * alignment))

    def _placed(self, table: list[tuple[str, str, tuple[int, ...], int]], first: int) -> dict[str, StoredEntry]:
        """Return the tensors with their places, given the first byte of data."""
        found = {}
        for name, kind, shape, offset in table:
            block, block_bytes = TYPES[kind].block, TYPES[kind].block_bytes
            if not shape or shape[-1] % block:
                raise CorruptError(
                    f"{self._path}: {name} has rows of {shape[-1:]} values, {kind} has blocks of {block}"
                )
            entry = StoredEntry(kind, shape, first + offset, prod(shape) // block * block_bytes)
            if entry.start + entry.num_bytes > len(self._data):
                raise CorruptError(
                    f"{self._path} is truncated: {name} ends at byte {entry.start + entry.num_bytes:,}, the file at "
                    f"{len(self._data):,}"
                )
            found[name] = entry
        return found

    def _entry(self) -> tuple[str, str, tuple[int, ...], int]:
        """Return name, format, shape and offset of a tensor."""
        name, (rank,) = self._text(), self._take("I")
        if rank > _MOST_DIMENSIONS:
            raise CorruptError(f"{self._path}: tensor {name} has {rank} dimensions; the file is damaged")
        sizes = self._take(f"{rank}Q")
        code, offset = self._take("IQ")
        return name, find_type(code, f"{self._path}: tensor {name}"), sizes[::-1], offset

    def _take(self, letters: str) -> tuple[Any, ...]:
        """Return the next numbers of the file, whose types ``letters`` has as ``struct`` writes them."""
        size = struct.calcsize(f"<{letters}")
        self._require(size)
        self._at += size
        return struct.unpack_from(f"<{letters}", self._data, self._at - size)

    def _text(self) -> str:
        """Return the next string: its length, then its bytes in UTF-8."""
        (length,) = self._take("Q")
        self._require(length)
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        """Return the next value of a type."""
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._take(self._letter(kind))[0]
        inner, count = self._take("IQ")
        if inner not in _SCALARS:
            self._require(8 * count)  # the least that so many strings or arrays take
            return [self._value(inner) for _ in range(count)]
        letter = self._letter(inner)
        self._require(struct.calcsize(f"<{letter}") * count)
        return list(self._take(f"{count}{letter}"))

    def _letter(self, kind: int) -> str:
        """Return the letter of ``struct`` for a type of value."""
        if kind not in _SCALARS:
            raise CorruptError(f"{self._path}: a key has the unknown type {kind}; the file is damaged")
        return _SCALARS[kind]

    def _require(self, size: int) -> None:
        """Refuse to read beyond the end."""
        if self._at + size > len(self._data):
            raise CorruptError(
                f"{self._path} ({format_bytes(len(self._data))}) is truncated or damaged: its header goes on for "
                f"{size:,} bytes from byte {self._at:,}"
            )
