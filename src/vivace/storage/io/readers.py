"""Reading parts of a file into memory that is already there: directly, through the page cache, or from a map.

Three readers give the same bytes. *direct* (O_DIRECT) takes them from the device past the page cache, so what is read
counts against no other memory; *buffered* goes through the cache; *mmap* copies from a map of the file. Which is best
is measured on the file itself (``probing.py``). A device is only fast with many reads under way at once, which is the
business of the asynchronous reader (``async_reader.py``).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

from vivace.errors import CheckpointError, CorruptError, UnsupportedError

Kind = Literal["direct", "buffered", "mmap"]

PAGE = 4096
"""Bytes of a page: direct reads begin and end at multiples of it, and each page has a checksum."""
NUM_THREADS = 4
"""Long reads (of about a MiB) that are kept under way at once."""


class Reader(Protocol):
    """Reads one file and blocks until the bytes have arrived; several threads may call it at once."""

    name: Kind
    path: Path

    @property
    def file(self) -> int | None:
        """The descriptor for reads that bypass ``read``; None where the bytes come another way."""
        ...

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` on.

        Raises:
            CorruptError: the file ends before ``into`` is full.
            CheckpointError: the device fails.
        """
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class BufferedReader:
    """Reads through the kernel's page cache."""

    name: Kind = "buffered"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = os.open(path, os.O_RDONLY)
        self._close = _closes(self, self.file)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` on; raises as ``Reader``."""
        _read(self.file, self.path, offset, into)

    def close(self) -> None:
        """Close the file."""
        self._close()


class DirectReader:
    """Reads past the page cache; a read that is not aligned to pages goes through an aligned buffer of the thread."""

    name: Kind = "direct"

    def __init__(self, path: Path) -> None:
        """Open the file with ``O_DIRECT``.

        Raises:
            UnsupportedError: this system or this file system has no direct reads.
        """
        flag = getattr(os, "O_DIRECT", None)
        if flag is None:
            raise UnsupportedError("this system has no O_DIRECT")
        self.path = path
        try:
            self.file = os.open(path, os.O_RDONLY | flag)
            self._close = _closes(self, self.file)
            os.preadv(self.file, [aligned(PAGE)], 0)
        except OSError as exc:
            raise UnsupportedError(f"the file system of {path} refuses O_DIRECT ({exc.strerror})") from exc
        self._own = threading.local()

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` on; raises as ``Reader``."""
        if not (offset % PAGE or len(into) % PAGE or address(into) % PAGE):
            _read(self.file, self.path, offset, into)
            return
        first = offset - offset % PAGE
        stop = -(-(offset + len(into)) // PAGE) * PAGE
        buffer = self._buffer(stop - first)
        _read(self.file, self.path, first, buffer, least=offset - first + len(into))
        into[:] = buffer[offset - first : offset - first + len(into)]

    def _buffer(self, size: int) -> memoryview:
        found: memoryview | None = getattr(self._own, "buffer", None)
        if found is None or len(found) < size:
            found = self._own.buffer = aligned(size)
        return found[:size]

    def close(self) -> None:
        """Close the file."""
        self._close()


class MapReader:
    """Copies from a memory map. A device that fails meanwhile ends the process: the system reports no error."""

    name: Kind = "mmap"
    file = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY)
        self._close = _closes(self, self._file)
        self._map = mmap.mmap(self._file, 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` on; raises as ``Reader``."""
        size = min(len(self._map), os.fstat(self._file).st_size)
        if offset + len(into) > size:
            raise truncated(self.path, offset, len(into), max(0, size - offset))
        first = offset - offset % mmap.PAGESIZE
        if hasattr(mmap, "MADV_WILLNEED"):
            self._map.madvise(mmap.MADV_WILLNEED, first, offset + len(into) - first)
        into[:] = memoryview(self._map)[offset : offset + len(into)]
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, offset + len(into) - first)

    def close(self) -> None:
        """Close the file."""
        self._map.close()
        self._close()


READERS: dict[str, Callable[[Path], Reader]] = {
    "direct": DirectReader,
    "buffered": BufferedReader,
    "mmap": MapReader,
}


def aligned(num_bytes: int) -> memoryview:
    """Allocate ``num_bytes`` of writable memory that begin on a page; the kernel counts them as anonymous (RssAnon)."""
    size = max(num_bytes, 1)
    if hasattr(mmap, "MAP_PRIVATE"):
        return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:num_bytes]
    return memoryview(mmap.mmap(-1, size))[:num_bytes]


def address(memory: memoryview) -> int:
    """Return the address of a memory view; 0 for an empty one."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if len(memory) else 0


def _closes(reader: object, file: int) -> weakref.finalize[[int], object]:
    """Close a descriptor when this is called, or when its reader is no longer used."""
    found = weakref.finalize(reader, os.close, file)
    found.atexit = False
    return found


def _read(file: int, path: Path, offset: int, into: memoryview, least: int | None = None) -> None:
    """Fill ``into``, reading again where the system returned less; at least ``least`` bytes must be in the file."""
    done, needed = 0, len(into) if least is None else least
    while done < needed:
        try:
            got = os.preadv(file, [into[done:]], offset + done)
        except OSError as exc:
            raise unreadable(path, offset + done, exc.strerror) from exc
        if got == 0:
            raise truncated(path, offset, needed, done)
        done += got


def unreadable(path: Path, offset: int, why: str | None) -> CheckpointError:
    """Return the error of a device that failed."""
    return CheckpointError(f"{path} could not be read at byte {offset}: {why}; check the disk, then ask again")


def closed(path: Path) -> CheckpointError:
    """Return the error of reading a file whose reader was closed."""
    return CheckpointError(f"{path} is closed, and is no longer read; load the model again")


def truncated(path: Path, offset: int, wanted: int, found: int) -> CorruptError:
    """Return the error of a file that ends before all wanted bytes."""
    return CorruptError(
        f"{path} ends early: {wanted} bytes were wanted at byte {offset}, {found} are there; convert the model again"
    )
