"""The asynchronous reader over a file descriptor, with native threads (``kernels/native/reader.cpp``).

These threads never ask the Python interpreter for a turn. Decoding is small operations called from Python, and threads
of Python that take turns with them cost it a third of its speed.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from ctypes import byref, c_int64

import torch
from torch import Tensor

from vivace.errors import CheckpointError
from vivace.kernels.library import DAMAGED, ENDED, CEnded, CExtent, found_library
from vivace.storage.io.async_reader import CHUNK_BYTES, AsyncReader, PendingRead, Traffic
from vivace.storage.io.checksums import page_sums_of
from vivace.storage.io.readers import NUM_THREADS, PAGE, Reader, address, closed, truncated, unreadable
from vivace.storage.io.thread_reader import ThreadAsyncReader

MOST_AT_ONCE = 64
"""Ended batches that the native reader reports in one call."""


def open_async_reader(reader: Reader, *, num_threads: int = NUM_THREADS, chunk_bytes: int = CHUNK_BYTES) -> AsyncReader:
    """Open the native implementation where the reader has a file descriptor and the kernels are built, else the other.

    Args:
        reader: the blocking reader, which must stay open as long as the result.
        num_threads: reads under way at once.
        chunk_bytes: most bytes of one read, a multiple of 4096.
    """
    library = found_library()
    if library is None or reader.file is None:
        return ThreadAsyncReader(reader, num_threads=num_threads, chunk_bytes=chunk_bytes)
    return NativeAsyncReader(library, reader, num_threads=num_threads, chunk_bytes=chunk_bytes)


class NativeAsyncReader(AsyncReader):
    """Reads a file descriptor with native threads (``kernels/native/reader.cpp``)."""

    def __init__(
        self,
        library: ctypes.CDLL,
        reader: Reader,
        *,
        num_threads: int = NUM_THREADS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Start the threads; for the arguments see ``open_async_reader``."""
        assert chunk_bytes % PAGE == 0, chunk_bytes
        assert reader.file is not None, reader.name
        self._reader = reader
        self._library = library
        self._reads: dict[int, PendingRead] = {}
        self._memories: dict[int, memoryview] = {}
        self._ended = (CEnded * MOST_AT_ONCE)()
        self._pages = page_sums_of(reader)
        table = (None, 0) if self._pages is None else (self._pages.address, self._pages.count)
        handle = library.vivace_reader_open(reader.file, num_threads, chunk_bytes, reader.name == "direct", *table)
        self._handle = ctypes.c_void_p(handle)
        self._total = Traffic()
        """The totals when this was closed."""
        # The threads read the file and these checksums and write into these memories, so all must outlive the threads.
        self._stop = weakref.finalize(self, _close, library, self._handle, (reader, self._memories, self._pages))

    @property
    def reader(self) -> Reader:
        """The blocking reader of the file."""
        return self._reader

    @property
    def traffic(self) -> Traffic:
        """Totals from when the reader was opened until it was closed."""
        if not self._stop.alive:
            return self._total
        out = (c_int64 * 3)()
        self._library.vivace_reader_counts(self._handle, out)
        num_reads, num_bytes, busy_ns = out
        return Traffic(num_reads, num_bytes, busy_ns / 1e9, self.wait_s)

    def submit(self, memory: memoryview, extents: Tensor, due: int = 0, rank: int = 0) -> PendingRead:
        """Begin to read scattered places."""
        extents = extents.to(torch.int64).contiguous()
        assert not len(extents) or int(extents[:, 1:].sum(1).max()) <= len(memory), "outside of the memory"
        return self._begin(memory, extents.data_ptr(), len(extents), due, rank)

    def submit_whole(self, memory: memoryview, offset: int, due: int = 0, rank: int = 0) -> PendingRead:
        """Begin to fill a memory from one offset."""
        return self._begin(memory, byref(CExtent(offset, 0, len(memory))), 1, due, rank)

    def _begin(self, memory: memoryview, extents: object, count: int, due: int, rank: int) -> PendingRead:
        self._require_open()
        start = address(memory)
        number = self._library.vivace_reader_submit(self._handle, start, extents, count, due, rank)
        self._memories[number] = memory
        read = self._reads[number] = PendingRead(self, number)
        return read

    def reschedule(self, read: PendingRead, due: int) -> None:
        """Change when a batch is due."""
        self._require_open()
        self._library.vivace_reader_reschedule(self._handle, read.number, due)

    def completed(self, *, waits: bool) -> list[PendingRead]:
        """Return the batches that have ended and that nobody joined."""
        self._require_open()
        count = self._library.vivace_reader_completed(self._handle, self._ended, MOST_AT_ONCE, waits)
        found = [self._end(self._ended[place]) for place in range(count)]
        if waits and not found:  # none is under way: what is still waited for had ended in a call that was interrupted
            for number in list(self._reads):
                found.append(self._forget(number))
                found[-1].end(_unknown(self._reader))
        return found

    def join(self, read: PendingRead) -> None:
        """Block until a batch is over."""
        if not self._stop.alive:
            self._forget(read.number).end(closed(self._reader.path))
            return
        ended = CEnded(-1)
        self._library.vivace_reader_wait(self._handle, read.number, byref(ended))
        if ended.number == read.number:
            self._end(ended)
        else:  # it had ended in a call that was interrupted, and nobody was told how
            self._forget(read.number).end(_unknown(self._reader))

    def close(self) -> None:
        """Stop the threads."""
        self._total = self.traffic
        self._stop()

    def _require_open(self) -> None:
        """Raise where this was closed: the native reader behind the handle is gone, and its memory with it."""
        if not self._stop.alive:
            raise closed(self._reader.path)

    def _end(self, ended: CEnded) -> PendingRead:
        read = self._forget(ended.number)
        read.end(self._error(ended.error, ended.offset, ended.bytes))
        return read

    def _forget(self, number: int) -> PendingRead:
        del self._memories[number]
        return self._reads.pop(number)

    def _error(self, number: int, offset: int, num_bytes: int) -> Exception | None:
        if number == 0:
            return None
        path = self._reader.path
        if number == DAMAGED:
            assert self._pages is not None
            return self._pages.damaged(offset)
        if number == ENDED:
            return truncated(path, offset, num_bytes, max(0, path.stat().st_size - offset))
        return unreadable(path, offset, os.strerror(number))


def _unknown(reader: Reader) -> CheckpointError:
    return CheckpointError(f"reading {reader.path} was interrupted; ask again")


def _close(library: ctypes.CDLL, handle: ctypes.c_void_p, _kept: object) -> None:
    library.vivace_reader_close(handle)
