"""The asynchronous reader: many reads of one file under way at once, the most urgent first.

A *batch* is what is submitted together: one place in the file, or many scattered ones. Threads take it on in chunks, so
that an urgent batch overtakes another at the next chunk. Urgency is the pair ``(due, rank)``, the lower the more
urgent; batches of equal urgency are read in the order in which they were submitted. Whoever submits receives a
``PendingRead`` and either waits for that one (layers, neurons) or asks which have ended (experts).

There are two implementations: ``native_reader.py`` for files, wherever the native kernels are built, and
``thread_reader.py`` for everything else.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from vivace.storage.io.readers import Reader

CHUNK_BYTES = 1 << 20
"""Most bytes of one read, unless the caller asks for other chunks."""


@dataclass
class Traffic:
    """Totals of what an asynchronous reader has read."""

    num_reads: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    """Seconds with at least one read under way."""
    wait_s: float = 0.0
    """Seconds that callers stood still in ``PendingRead.wait``."""

    def __add__(self, other: Traffic) -> Traffic:
        """Return the totals of two readers together."""
        return Traffic(
            self.num_reads + other.num_reads,
            self.num_bytes + other.num_bytes,
            self.busy_s + other.busy_s,
            self.wait_s + other.wait_s,
        )

    @property
    def gb_per_s(self) -> float:
        """Speed in 10^9 bytes a second while at least one read was under way."""
        return self.num_bytes / self.busy_s / 1e9 if self.busy_s else 0.0


@dataclass(eq=False)
class PendingRead:
    """A batch that was submitted; its memory may be used when it is over without an error."""

    reader: AsyncReader
    number: int
    is_over: bool = False
    error: Exception | None = None
    """The first thing that went wrong, in the order in which the batch lists its places."""

    def wait(self) -> None:
        """Block until all bytes have arrived; no thread touches the memory afterwards, even when this raises.

        Raises:
            CorruptError: the file is too short, or a page does not have its checksum.
            CheckpointError: the device failed.
        """
        begun = time.perf_counter()
        error = self.join()
        self.reader.wait_s += time.perf_counter() - begun
        if error is not None:
            raise error

    def join(self) -> Exception | None:
        """Block until no read of the batch is under way, and return its error instead of raising it."""
        if not self.is_over:
            self.reader.join(self)
        return self.error

    def end(self, error: Exception | None) -> None:
        """Mark the batch as over; ``error`` says why it failed, None that all was read."""
        self.is_over, self.error = True, error


class AsyncReader(ABC):
    """Reads one file in the background; only one thread at a time may call its methods."""

    wait_s: float = 0.0
    """Seconds that callers stood still in ``PendingRead.wait``."""

    @abstractmethod
    def submit(self, memory: memoryview, extents: Tensor, due: int = 0, rank: int = 0) -> PendingRead:
        """Begin to read scattered places of the file.

        Args:
            memory: where the bytes go.
            extents: (n, 3) int64; each row is an offset in the file, an offset in ``memory`` and a number of bytes.
            due: when the bytes will be needed, on any clock of the caller; the earliest are read first.
            rank: breaks ties between batches that are due at once; the lowest are read first.
        """

    @abstractmethod
    def submit_whole(self, memory: memoryview, offset: int, due: int = 0, rank: int = 0) -> PendingRead:
        """Begin to fill all of ``memory`` from one offset of the file; ``due`` and ``rank`` as in ``submit``."""

    @abstractmethod
    def reschedule(self, read: PendingRead, due: int) -> None:
        """Change when a batch is due; chunks that are under way already are not affected."""

    @abstractmethod
    def completed(self, *, waits: bool) -> list[PendingRead]:
        """Return the batches that have ended since the last call and that nobody joined, the first to end first.

        Args:
            waits: block until there is one, if any batch is under way.
        """

    @abstractmethod
    def join(self, read: PendingRead) -> None:
        """Block until a batch is over."""

    @abstractmethod
    def close(self) -> None:
        """Stop the threads; the blocking reader stays open.

        Batches that have not begun are given up, and asking for others raises ``CheckpointError``.
        """

    @property
    @abstractmethod
    def reader(self) -> Reader:
        """The blocking reader of the file."""

    @property
    @abstractmethod
    def traffic(self) -> Traffic:
        """Totals since the reader was opened."""
