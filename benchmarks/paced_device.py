"""A simulated device: loading an expert takes the time that a device of a given speed would need, and no computation.

All experts are in memory. A load only waits: chunks follow one another at the given speed, the most urgent first, as
over a channel of its own, and the memory of a slot records which expert it holds. Loads therefore overlap with
computation as a device's own transfers do, whereas threads that copied would compete with the threads that compute.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from vivace.core.moe import Expert
from vivace.core.step import Step
from vivace.storage.experts.policy import Key
from vivace.storage.io.async_reader import AsyncReader, PendingRead, Traffic
from vivace.storage.io.readers import Reader, address

SPIN_S = 2e-4
"""Seconds at the end of a wait that are spent in a loop, because sleeping ends late."""


@dataclass(order=True)
class _Load:
    """A pending load, ordered by urgency."""

    due: int
    rank: int
    number: int
    left: int = field(compare=False)
    """Number of bytes that have not been read yet."""
    read: PendingRead = field(compare=False)


class PacedDevice(AsyncReader):
    """An asynchronous reader without threads: every call computes what has finished by now."""

    def __init__(
        self,
        chunk_bytes: int,
        bytes_per_s: float,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start without loads.

        Args:
            chunk_bytes: bytes that are read at once; a more urgent load waits for no more than this.
            bytes_per_s: speed of all loads together.
            now: the clock, in seconds.
            sleep: sleeps for a number of seconds.
        """
        self.chunk_bytes, self.bytes_per_s = chunk_bytes, bytes_per_s
        self._now, self._sleep = now, sleep
        self.offsets: dict[int, int] = {}
        """Offset in the file of what a memory holds or will hold, by its address."""
        self._waiting: list[_Load] = []
        self._arriving: list[tuple[float, PendingRead]] = []
        """Time when each load ends, in order."""
        self._free_at = 0.0
        self._count = itertools.count()

    @property
    def reader(self) -> Reader:
        """Not available, since there is no file."""
        raise NotImplementedError

    @property
    def traffic(self) -> Traffic:
        """Empty, since nothing is counted."""
        return Traffic()

    def submit(self, memory: memoryview, extents: Tensor, due: int = 0, rank: int = 0) -> PendingRead:
        """Not available, since experts are read whole."""
        raise NotImplementedError

    def submit_whole(self, memory: memoryview, offset: int, due: int = 0, rank: int = 0) -> PendingRead:
        """Start to fill a memory."""
        self._go_on(until := self._now())
        self._free_at = max(self._free_at, until) if not self._waiting else self._free_at
        self.offsets[address(memory)] = offset
        read = PendingRead(self, next(self._count))
        heapq.heappush(self._waiting, _Load(due, rank, read.number, len(memory), read))
        return read

    def reschedule(self, read: PendingRead, due: int) -> None:
        """Change when a read is due."""
        self._go_on(self._now())
        for load in self._waiting:
            if load.read is read:
                load.due = due
        heapq.heapify(self._waiting)

    def completed(self, *, waits: bool) -> list[PendingRead]:
        """Return the reads that have ended since the last call."""
        self._go_on(now := self._now())
        if waits and not (self._arriving and self._arriving[0][0] <= now):
            while self._waiting and not self._arriving:
                self._read()
            if self._arriving:
                now = self._wait(self._arriving[0][0])
        found: list[PendingRead] = []
        while self._arriving and self._arriving[0][0] <= now:
            read = self._arriving.pop(0)[1]
            read.end(None)
            found.append(read)
        return found

    def join(self, read: PendingRead) -> None:
        """Not available, since nothing waits for a single load."""
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing, since there are no threads."""

    def _go_on(self, now: float) -> None:
        """Read chunks until the given time."""
        while self._waiting and self._free_at < now:
            self._read()

    def _read(self) -> None:
        """Read one chunk of the most urgent load."""
        load = self._waiting[0]
        size = min(self.chunk_bytes, load.left)
        load.left -= size
        self._free_at += size / self.bytes_per_s
        if not load.left:
            heapq.heappop(self._waiting)
            self._arriving.append((self._free_at, load.read))

    def _wait(self, until: float) -> float:
        """Wait until a time and return the time then."""
        while (left := until - (now := self._now())) > 0:
            if left > SPIN_S:
                self._sleep(left - SPIN_S)
        return now


class PacedExperts:
    """An ``ExpertStore`` with all experts in memory behind a simulated device, for one cache."""

    def __init__(
        self, expert_bytes: int, offsets: Mapping[Key, int], experts: Mapping[int, Expert], bytes_per_s: float
    ) -> None:
        """Put experts behind a device.

        Args:
            expert_bytes: bytes of an expert.
            offsets: offset at which each expert would lie in a file.
            experts: experts by these offsets.
            bytes_per_s: speed of the device.
        """
        self.expert_bytes, self.bytes_per_s = expert_bytes, bytes_per_s
        self._offsets, self._experts = offsets, experts
        self._device: PacedDevice | None = None

    def offset(self, key: Key) -> int:
        """Return where an expert would lie."""
        return self._offsets[key]

    def open_reader(self, *, num_threads: int, chunk_bytes: int) -> AsyncReader:
        """Return the device, which reads a chunk at a time; slots stay empty."""
        self._device = PacedDevice(chunk_bytes, self.bytes_per_s)
        return self._device

    def expert(self, memory: Tensor) -> Expert:
        """Return a feed-forward that runs whichever expert is in the slot."""
        return _InSlot(self, memory.data_ptr())

    def at(self, slot: int) -> Expert:
        """Return the expert in a slot, by the address of its memory."""
        assert self._device is not None
        return self._experts[self._device.offsets[slot]]


@dataclass(frozen=True)
class _InSlot:
    """A feed-forward that runs the expert that is in its slot when it is called."""

    experts: PacedExperts
    slot: int

    def __call__(self, x: Tensor, step: Step, add: Tensor | None = None, /) -> Tensor:
        return self.experts.at(self.slot)(x, step, add)
