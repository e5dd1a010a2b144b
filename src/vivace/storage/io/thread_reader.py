"""The asynchronous reader over any blocking reader, with threads of Python.

It is used where the native kernels are not built and for memory maps, which have no descriptor to read from.
"""

from __future__ import annotations

import heapq
import threading
import time
import weakref
from dataclasses import dataclass, field

from torch import Tensor

from vivace.errors import VivaceError
from vivace.storage.io.async_reader import CHUNK_BYTES, AsyncReader, PendingRead, Traffic
from vivace.storage.io.readers import NUM_THREADS, PAGE, Reader, closed


@dataclass(order=True)
class _Batch:
    """A batch of ``ThreadAsyncReader``, ordered by urgency."""

    due: int
    rank: int
    number: int
    memory: memoryview = field(compare=False)
    chunks: list[tuple[int, int, int]] = field(compare=False)
    """Each an offset in the file, an offset in ``memory`` and a number of bytes."""
    next: int = field(default=0, compare=False)
    """Index of the first chunk that no thread has taken on."""
    under_way: int = field(default=0, compare=False)
    failed: int = field(default=-1, compare=False)
    """Index of the chunk that ``error`` is about."""
    error: Exception | None = field(default=None, compare=False)

    @property
    def is_over(self) -> bool:
        """No chunk is left or under way."""
        return self.next == len(self.chunks) and not self.under_way

    def fail(self, place: int, error: Exception) -> None:
        """Keep the error of the first chunk in order, and give up those that have not begun."""
        if self.error is None or place < self.failed:
            self.failed, self.error = place, error
        self.next = len(self.chunks)


class ThreadAsyncReader(AsyncReader):
    """Reads with threads of Python, which end when it is closed or no longer used."""

    def __init__(self, reader: Reader, *, num_threads: int = NUM_THREADS, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Start the threads; for the arguments see ``open_async_reader``."""
        assert chunk_bytes % PAGE == 0, chunk_bytes
        self._reader, self._chunk_bytes = reader, chunk_bytes
        self._reads: dict[int, PendingRead] = {}
        self._count = 0
        self._queue = _Queue(reader)
        self._threads = [threading.Thread(target=self._queue.work, daemon=True) for _ in range(num_threads)]
        weakref.finalize(self, self._queue.close).atexit = False
        for thread in self._threads:
            thread.start()

    @property
    def reader(self) -> Reader:
        """The blocking reader of the file."""
        return self._reader

    @property
    def traffic(self) -> Traffic:
        """Totals since the reader was opened."""
        self._queue.traffic.wait_s = self.wait_s
        return self._queue.traffic

    def submit(self, memory: memoryview, extents: Tensor, due: int = 0, rank: int = 0) -> PendingRead:
        """Begin to read scattered places."""
        return self._begin(memory, extents.tolist(), due, rank)

    def submit_whole(self, memory: memoryview, offset: int, due: int = 0, rank: int = 0) -> PendingRead:
        """Begin to fill a memory from one offset."""
        return self._begin(memory, [[offset, 0, len(memory)]], due, rank)

    def _begin(self, memory: memoryview, extents: list[list[int]], due: int, rank: int) -> PendingRead:
        self._require_open()
        chunks = [
            (offset + first, place + first, min(self._chunk_bytes, size - first))
            for offset, place, size in extents
            for first in range(0, size, self._chunk_bytes)
        ]
        read = self._reads[self._count] = PendingRead(self, self._count)
        self._count += 1
        self._queue.add(_Batch(due, rank, read.number, memory, chunks))
        return read

    def reschedule(self, read: PendingRead, due: int) -> None:
        """Change when a batch is due."""
        self._require_open()
        self._queue.reschedule(read.number, due)

    def completed(self, *, waits: bool) -> list[PendingRead]:
        """Return the batches that have ended and that nobody joined."""
        self._require_open()
        return [self._end(batch) for batch in self._queue.completed(waits=waits)]

    def join(self, read: PendingRead) -> None:
        """Block until a batch is over."""
        batch = self._queue.wait(read.number)
        if batch is not None:
            self._end(batch)
        else:
            self._reads.pop(read.number).end(closed(self._reader.path))

    def close(self) -> None:
        """Stop the threads."""
        self._queue.close()
        for thread in self._threads:
            thread.join()

    def _require_open(self) -> None:
        """Raise where this was closed: no thread would ever read what is asked for."""
        if self._queue.is_closed:
            raise closed(self._reader.path)

    def _end(self, batch: _Batch) -> PendingRead:
        read = self._reads.pop(batch.number)
        read.end(batch.error)
        self._queue.forget(batch)
        return read


class _Queue:
    """The batches of a reader and the work of its threads, which know nothing of the reader itself."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.traffic = Traffic()
        self._batches: dict[int, _Batch] = {}
        self._waiting: list[_Batch] = []
        self._over: list[_Batch] = []
        self._running = 0
        self._since = 0.0
        self.is_closed = False
        # A reader may be collected, which closes its queue, in a thread that holds the lock.
        lock = threading.RLock()
        self._asked, self._ended = threading.Condition(lock), threading.Condition(lock)

    def add(self, batch: _Batch) -> None:
        """Add a batch to those that are to be read."""
        with self._asked:
            self._batches[batch.number] = batch
            if batch.chunks:
                heapq.heappush(self._waiting, batch)
                self._asked.notify(len(batch.chunks))
            else:
                self._over.append(batch)

    def reschedule(self, number: int, due: int) -> None:
        """Change when a batch is due."""
        with self._asked:
            batch = self._batches.get(number)
            if batch is not None:
                batch.due = due
                heapq.heapify(self._waiting)

    def completed(self, *, waits: bool) -> list[_Batch]:
        """Return the batches that are over and not forgotten."""
        with self._ended:
            if waits:
                self._ended.wait_for(lambda: self._over or not self._batches)
            return self._over[:]

    def wait(self, number: int) -> _Batch | None:
        """Block until a batch is over, and return it; None if this is closed before."""
        with self._ended:
            batch = self._batches[number]
            self._ended.wait_for(lambda: batch.is_over or self.is_closed)
            return batch if batch.is_over else None

    def forget(self, batch: _Batch) -> None:
        """Drop a batch that is over."""
        with self._ended:
            self._over.remove(batch)
            del self._batches[batch.number]

    def close(self) -> None:
        """Let the threads end."""
        with self._asked:
            self.is_closed = True
            self._asked.notify_all()
            self._ended.notify_all()

    def work(self) -> None:
        """Read chunks, the most urgent first, until this is closed."""
        while True:
            with self._asked:
                self._asked.wait_for(lambda: self._waiting or self.is_closed)
                if self.is_closed:
                    return
                batch = self._waiting[0]
                place = batch.next
                offset, first, size = batch.chunks[place]
                batch.next += 1
                batch.under_way += 1
                if batch.next == len(batch.chunks):
                    heapq.heappop(self._waiting)
                self._since = self._since if self._running else time.perf_counter()
                self._running += 1
            error: Exception | None = None
            try:
                self._reader.read(offset, batch.memory[first : first + size])
            except (OSError, VivaceError) as exc:
                error = exc
            with self._ended:
                self._finish(batch, place, size, error)

    def _finish(self, batch: _Batch, place: int, size: int, error: Exception | None) -> None:
        """Account for a chunk that was read; called with the lock held."""
        self._running -= 1
        self.traffic.num_reads += 1
        self.traffic.num_bytes += size
        if not self._running:
            self.traffic.busy_s += time.perf_counter() - self._since
        batch.under_way -= 1
        if error is not None:
            if batch.next < len(batch.chunks):
                self._waiting.remove(batch)
                heapq.heapify(self._waiting)
            batch.fail(place, error)
        if batch.is_over:
            self._over.append(batch)
            self._ended.notify_all()
