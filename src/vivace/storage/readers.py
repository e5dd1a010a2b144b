"""Reading parts of a file into memory that is already there: directly, through the page cache, or from a map.

Three readers give the same bytes. *direct* (O_DIRECT) takes them from the device past the page cache, so what is read
counts against no other memory; *buffered* goes through the cache; *mmap* copies from a map of the file. Which is best
is measured on the file itself (``open_reader``), and where one is missing the choice says why.

A ``ReadPool`` cuts reads into chunks and hands them to a few threads: devices are only fast with several reads under
way. All counters are ours; ``device_bytes`` asks the kernel what really came from the device.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, get_args

from vivace.errors import CheckpointError, ConfigError, CorruptError, UnsupportedError, nearest

Kind = Literal["direct", "buffered", "mmap"]

PAGE = 4096
CHUNK_BYTES = 1 << 20
NUM_THREADS = 4
PROBE_BYTES = 32 << 20
"""What is read to compare readers."""


class Reader(Protocol):
    """Reads one file; called from several threads."""

    name: Kind

    @property
    def file(self) -> int | None:
        """Descriptor that plain reads of whole pages may go to; None where bytes come another way."""
        ...

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` on.

        Raises:
            CorruptError: the file ends before.
            CheckpointError: the device fails.
        """
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


class BufferedReader:
    """Through the page cache."""

    name: Kind = "buffered"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = os.open(path, os.O_RDONLY)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` on; raises as ``Reader``."""
        _read(self.file, self.path, offset, into)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self.file)


class DirectReader:
    """Past the page cache. What is not aligned to pages goes through a page-aligned buffer of the thread."""

    name: Kind = "direct"

    def __init__(self, path: Path) -> None:
        """Open.

        Raises:
            UnsupportedError: neither this system nor this file system reads so.
        """
        flag = getattr(os, "O_DIRECT", None)
        if flag is None:
            raise UnsupportedError("this system has no O_DIRECT")
        self.path = path
        try:
            self.file = os.open(path, os.O_RDONLY | flag)
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
        """Let go of the file."""
        os.close(self.file)


class MapReader:
    """Copies from a map of the file. A device that fails while a map is read ends the process: no error can be told."""

    name: Kind = "mmap"
    file = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY)
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
        """Let go of the file."""
        self._map.close()
        os.close(self._file)


READERS: dict[str, Callable[[Path], Reader]] = {
    "direct": DirectReader,
    "buffered": BufferedReader,
    "mmap": MapReader,
}


def aligned(num_bytes: int) -> memoryview:
    """Writable memory that begins on a page; the process's own, so that it counts as such (RssAnon)."""
    size = max(num_bytes, 1)
    if hasattr(mmap, "MAP_PRIVATE"):
        return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:num_bytes]
    return memoryview(mmap.mmap(-1, size))[:num_bytes]


def address(memory: memoryview) -> int:
    """Where it lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if len(memory) else 0


def _read(file: int, path: Path, offset: int, into: memoryview, least: int | None = None) -> None:
    """Fill ``into``, asking again where a read was short; ``least`` bytes must be there."""
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
    """The device failed."""
    return CheckpointError(f"{path} could not be read at byte {offset}: {why}; check the disk, then ask again")


def truncated(path: Path, offset: int, wanted: int, found: int) -> CorruptError:
    """A file has fewer bytes than were wanted."""
    return CorruptError(
        f"{path} ends early: {wanted} bytes were wanted at byte {offset}, {found} are there; convert the model again"
    )


@dataclass(frozen=True)
class Choice:
    """A reader and why it was taken."""

    reader: Reader
    why: str
    gb_per_s: float | None = None
    """Of the probe, 10^9 bytes a second; None when nothing was measured."""


def open_reader(path: Path, kind: str = "auto") -> Choice:
    """The reader asked for; "auto" takes the fastest from a cold cache, measured on this file.

    Raises:
        ConfigError: there is no such reader.
        UnsupportedError: it does not work here, and was asked for by name.
    """
    if kind != "auto":
        if kind not in READERS:
            raise ConfigError(f"there is no reader {kind!r}{nearest(kind, ('auto', *READERS))}")
        return Choice(READERS[kind](path), "asked for")
    speeds: dict[str, float] = {}
    missing: list[str] = []
    opened: dict[str, Reader] = {}
    for name in get_args(Kind):
        try:
            opened[name] = READERS[name](path)
        except UnsupportedError as exc:
            missing.append(str(exc))
            continue
        speeds[name] = probe(opened[name], path)
    best = max(speeds, key=speeds.__getitem__)
    for name, reader in opened.items():
        if name != best:
            reader.close()
    told = ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items())
    why = "; ".join([f"fastest of {told} GB/s from a cold cache", *missing])
    return Choice(opened[best], why, speeds[best])


def probe(reader: Reader, path: Path, num_bytes: int = PROBE_BYTES, num_threads: int = NUM_THREADS) -> float:
    """GB/s (10^9 bytes) of a reader on the middle of its file, the page cache told to forget it before."""
    size = path.stat().st_size
    num_bytes = min(num_bytes, size - size % PAGE)
    first = (size - num_bytes) // 2 // PAGE * PAGE
    drop_cached(path, first, num_bytes)
    memory = aligned(num_bytes)
    with ReadPool(reader, num_threads=num_threads) as pool:
        begun = time.perf_counter()
        pool.submit([(first, memory)]).wait()
        return num_bytes / (time.perf_counter() - begun) / 1e9


def drop_cached(path: Path, first: int = 0, num_bytes: int = 0) -> bool:
    """Ask the kernel to forget a part of a file (0 bytes: to its end); False where it cannot be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, first, num_bytes, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
    return True


def device_bytes() -> int | None:
    """Bytes this process has made the device read, as the kernel counts them; None where it does not say."""
    try:
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    except OSError:
        return None
    return None


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


@dataclass
class Chunks:
    """What is read together, (place, offset, memory); threads take one after the other."""

    left: deque[tuple[int, int, memoryview]]
    failed: list[tuple[int, BaseException]] = field(default_factory=list)
    """Places, and what went wrong there."""


class Ticket:
    """Reads that are under way together."""

    def __init__(self, futures: Sequence[Future[None]], chunks: Chunks, traffic: Traffic) -> None:
        self._futures = futures
        self._chunks = chunks
        self._traffic = traffic

    @property
    def is_done(self) -> bool:
        """Nothing is left to wait for."""
        return all(future.done() for future in self._futures)

    def wait(self) -> None:
        """Until every byte is there; no read touches the memory afterwards, whatever became of it.

        Raises:
            CorruptError: the file ends before.
            CheckpointError: the device fails.
        """
        begun = time.perf_counter()
        errors = self.settle()
        self._traffic.wait_s += time.perf_counter() - begun
        if errors:
            raise errors[0]

    def settle(self) -> list[BaseException]:
        """Until nothing is under way any more; what went wrong is returned in the order of what was asked for."""
        for future in self._futures:
            future.exception()
        return [error for _, error in sorted(self._chunks.failed, key=lambda each: each[0])]


class ReadPool:
    """A few threads that read chunks of one file."""

    def __init__(self, reader: Reader, *, num_threads: int = NUM_THREADS, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Start the threads; ``close`` stops them and leaves the reader open.

        Args:
            reader: the file.
            num_threads: reads under way at once.
            chunk_bytes: of one read at most, a multiple of 4096.
        """
        assert chunk_bytes % PAGE == 0, chunk_bytes
        self.reader = reader
        self.chunk_bytes = chunk_bytes
        self.num_threads = num_threads
        self.traffic = Traffic()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="vivace-read")
        self._lock = threading.Lock()
        self._running = 0
        self._since = 0.0

    def submit(self, extents: Sequence[tuple[int, memoryview]]) -> Ticket:
        """Begin to read (offset, memory) pairs; the memory is good after ``wait``."""
        cut = (chunk for offset, into in extents for chunk in self._cut(offset, into))
        chunks = Chunks(deque((place, *chunk) for place, chunk in enumerate(cut)))
        turns = range(min(self.num_threads, len(chunks.left)))
        return Ticket([self._threads.submit(self._read, chunks) for _ in turns], chunks, self.traffic)

    def _cut(self, offset: int, into: memoryview) -> list[tuple[int, memoryview]]:
        starts = range(0, len(into), self.chunk_bytes)
        return [(offset + first, into[first : first + self.chunk_bytes]) for first in starts]

    def _read(self, chunks: Chunks) -> None:
        with self._lock:
            self._since = self._since if self._running else time.perf_counter()
            self._running += 1
        num_reads = num_bytes = 0
        try:
            while chunks.left:
                try:
                    place, offset, into = chunks.left.popleft()
                except IndexError:  # another thread was faster
                    break
                num_reads += 1
                num_bytes += len(into)
                self._read_one(chunks, place, offset, into)
        finally:
            with self._lock:
                self._running -= 1
                self.traffic.num_reads += num_reads
                self.traffic.num_bytes += num_bytes
                if not self._running:
                    self.traffic.busy_s += time.perf_counter() - self._since

    def _read_one(self, chunks: Chunks, place: int, offset: int, into: memoryview) -> None:
        try:
            self.reader.read(offset, into)
        except BaseException as error:
            chunks.failed.append((place, error))
            raise

    def close(self) -> None:
        """Stop the threads; reads that have not begun are given up."""
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> ReadPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
