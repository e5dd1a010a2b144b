"""Many reads of one file under way at once: devices are only fast then, with scattered reads above all.

A pool cuts what is asked for into chunks and hands them to a few threads. Two pools do the same: ``ThreadPool`` with
threads of Python, over any reader, and ``NativePool`` over a file, whose threads never ask the interpreter for a turn:
thousands of reads of a few KiB a token would otherwise take turns with the operations that compute.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import c_int64
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from vivace.errors import VivaceError
from vivace.kernels.library import DAMAGED, ENDED, found_library
from vivace.storage.checksums import page_sums_of
from vivace.storage.readers import NUM_THREADS, PAGE, Reader, address, truncated, unreadable

CHUNK_BYTES = 1 << 20


@dataclass
class Traffic:
    """What a pool has read."""

    num_reads: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    """Seconds with at least one read under way."""
    wait_s: float = 0.0
    """Seconds somebody stood waiting for a ticket."""

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second while reading."""
        return self.num_bytes / self.busy_s / 1e9 if self.busy_s else 0.0


class Ticket:
    """Reads that are under way together."""

    def __init__(self, traffic: Traffic) -> None:
        """Whoever waits is counted in ``traffic``."""
        self._traffic = traffic

    def wait(self) -> None:
        """Until every byte is there; no read touches the memory afterwards, whatever became of it.

        Raises:
            CorruptError: the file ends before, or a page is not as it was written.
            CheckpointError: the device fails.
        """
        begun = time.perf_counter()
        error = self.settle()
        self._traffic.wait_s += time.perf_counter() - begun
        if error is not None:
            raise error

    def settle(self) -> Exception | None:
        """Until nothing is under way any more; what went wrong first, in the order of what was asked for."""
        raise NotImplementedError


class Pool(Protocol):
    """Reads one file; one thread at a time submits."""

    reader: Reader

    @property
    def traffic(self) -> Traffic:
        """What was read so far."""
        ...

    def submit(self, memory: memoryview, extents: Tensor) -> Ticket:
        """Begin to read; the memory is good after ``wait``.

        Args:
            memory: where to.
            extents: (n, 3) int64, each a place in the file, a place in ``memory`` and the bytes between.
        """
        ...

    def close(self) -> None:
        """Stop the threads and leave the reader open; reads that have not begun are given up."""
        ...


def open_pool(reader: Reader, *, num_threads: int = NUM_THREADS, chunk_bytes: int = CHUNK_BYTES) -> Pool:
    """Native where the reader is of a file and the kernels are built; else threads of Python.

    Args:
        reader: the file, which stays open as long as the pool.
        num_threads: reads under way at once.
        chunk_bytes: of one read at most, a multiple of 4096.
    """
    library = found_library()
    if library is None or reader.file is None:
        return ThreadPool(reader, num_threads=num_threads, chunk_bytes=chunk_bytes)
    return NativePool(library, reader, num_threads=num_threads, chunk_bytes=chunk_bytes)


def whole(offset: int, memory: memoryview) -> tuple[memoryview, Tensor]:
    """What ``submit`` takes to fill all of a memory from a place on."""
    return memory, torch.tensor([[offset, 0, len(memory)]])


@dataclass
class _Chunks:
    """What is read together, (number, offset, memory); threads take one after the other."""

    left: deque[tuple[int, int, memoryview]]
    failed: list[tuple[int, Exception]] = field(default_factory=list)
    """Numbers, and what went wrong there."""


class ThreadTicket(Ticket):
    """Of threads of Python."""

    def __init__(self, futures: Sequence[Future[None]], chunks: _Chunks, traffic: Traffic) -> None:
        super().__init__(traffic)
        self._futures = futures
        self._chunks = chunks

    def settle(self) -> Exception | None:
        """Until nothing is under way any more."""
        for future in self._futures:
            future.exception()
        return min(self._chunks.failed, key=lambda each: each[0])[1] if self._chunks.failed else None


class ThreadPool:
    """Fills ``Pool`` for whatever reads into memory."""

    def __init__(self, reader: Reader, *, num_threads: int = NUM_THREADS, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Start the threads."""
        assert chunk_bytes % PAGE == 0, chunk_bytes
        self.reader = reader
        self.traffic = Traffic()
        self._chunk_bytes, self._num_threads = chunk_bytes, num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="vivace-read")
        self._lock = threading.Lock()
        self._running = 0
        self._since = 0.0

    def submit(self, memory: memoryview, extents: Tensor) -> ThreadTicket:
        """Begin to read."""
        cut = (
            (offset + first, memory[place + first : place + min(first + self._chunk_bytes, size)])
            for offset, place, size in extents.tolist()
            for first in range(0, size, self._chunk_bytes)
        )
        chunks = _Chunks(deque((number, *chunk) for number, chunk in enumerate(cut)))
        turns = range(min(self._num_threads, len(chunks.left)))
        return ThreadTicket([self._threads.submit(self._read, chunks) for _ in turns], chunks, self.traffic)

    def _read(self, chunks: _Chunks) -> None:
        with self._lock:
            self._since = self._since if self._running else time.perf_counter()
            self._running += 1
        num_reads = num_bytes = 0
        try:
            while chunks.left:
                try:
                    number, offset, into = chunks.left.popleft()
                except IndexError:  # another thread was faster
                    break
                num_reads += 1
                num_bytes += len(into)
                try:
                    self.reader.read(offset, into)
                except (OSError, VivaceError) as error:
                    chunks.failed.append((number, error))
                    break
        finally:
            with self._lock:
                self._running -= 1
                self.traffic.num_reads += num_reads
                self.traffic.num_bytes += num_bytes
                if not self._running:
                    self.traffic.busy_s += time.perf_counter() - self._since

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(cancel_futures=True)


class NativeTicket(Ticket):
    """Of native threads."""

    def __init__(self, pool: NativePool, number: int, traffic: Traffic) -> None:
        super().__init__(traffic)
        self._pool = pool
        self._number = number
        self._is_over = False
        self._error: Exception | None = None

    def settle(self) -> Exception | None:
        """Until nothing is under way any more."""
        if not self._is_over:
            self._error = self._pool.ended(self._number)
            self._is_over = True
        return self._error


class NativePool:
    """Fills ``Pool`` for a file, on a system that the native kernels are built for."""

    def __init__(
        self,
        library: ctypes.CDLL,
        reader: Reader,
        *,
        num_threads: int = NUM_THREADS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Start the threads."""
        assert chunk_bytes % PAGE == 0, chunk_bytes
        assert reader.file is not None, reader.name
        self.reader = reader
        self._library = library
        self._traffic = Traffic()
        self._under_way: dict[int, memoryview] = {}  # whoever drops a ticket does not drop what it fills
        is_direct = reader.name == "direct"
        self._pages = page_sums_of(reader)
        table = (None, 0) if self._pages is None else (self._pages.address, self._pages.count)
        handle = library.vivace_scatter_open(reader.file, num_threads, chunk_bytes, is_direct, *table)
        self._handle = ctypes.c_void_p(handle)
        self.close = weakref.finalize(self, _close, library, self._handle, (self._under_way, self._pages))
        """Stop the threads."""

    @property
    def traffic(self) -> Traffic:
        """What was read so far."""
        found = self._traffic
        found.num_reads, found.num_bytes, busy_ns = self._asked(self._library.vivace_scatter_counts)
        found.busy_s = busy_ns / 1e9
        return found

    def submit(self, memory: memoryview, extents: Tensor) -> NativeTicket:
        """Begin to read."""
        extents = extents.to(torch.int64).contiguous()
        assert not len(extents) or int(extents[:, 1:].sum(1).max()) <= len(memory), "outside of the memory"
        start = address(memory)
        number = self._library.vivace_scatter_submit(self._handle, start, extents.data_ptr(), len(extents))
        self._under_way[number] = memory
        return NativeTicket(self, number, self._traffic)

    def ended(self, number: int) -> Exception | None:
        """Wait for what a ticket stands for, once; what went wrong first."""
        error, offset, size = self._asked(self._library.vivace_scatter_wait, number)
        del self._under_way[number]
        if error == 0:
            return None
        path = self.reader.path
        if error == DAMAGED:
            assert self._pages is not None
            return self._pages.damaged(offset)
        if error == ENDED:
            return truncated(path, offset, size, max(0, path.stat().st_size - offset))
        return unreadable(path, offset, os.strerror(error))

    def _asked(self, function: Callable[..., None], *arguments: int) -> list[int]:
        out = (c_int64 * 3)()
        function(self._handle, *arguments, out)
        return list(out)


def _close(library: ctypes.CDLL, handle: ctypes.c_void_p, _kept: object) -> None:
    library.vivace_scatter_close(handle)
