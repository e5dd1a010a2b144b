"""A device that is not here: loads of experts take the time it would, and no processor's.

All experts are in memory. Reading one only takes time: chunks go one after the other at a stated speed, the most urgent
first, as over a channel of its own; a slot says which expert is in it. So loads overlap compute as a device's own
transfers do, while threads that copied would take turns with the threads that compute.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from vivace.core.seams import Expert
from vivace.core.step import Step
from vivace.storage.channel import Channel, Load, reschedule
from vivace.storage.traces import Key

SPIN_S = 2e-4
"""Of a wait, not slept: sleeping ends late."""


class PacedDevice:
    """Fills ``Channel``: what happened by now is worked out whenever somebody asks."""

    def __init__(
        self,
        bundle_bytes: int,
        chunk_bytes: int,
        bytes_per_s: float,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Stand idle.

        Args:
            bundle_bytes: of a load.
            chunk_bytes: what is read at once; something more urgent waits for no more.
            bytes_per_s: of all loads together.
            now: the clock, in seconds.
            sleep: until then.
        """
        self.bundle_bytes, self.chunk_bytes, self.bytes_per_s = bundle_bytes, chunk_bytes, bytes_per_s
        self._now, self._sleep = now, sleep
        self.places: dict[int, int] = {}
        """What a slot holds or will hold."""
        self._waiting: list[Load] = []
        self._arriving: list[tuple[float, int]] = []
        """When a slot is filled, the first first."""
        self._free_at = 0.0
        self._count = itertools.count()

    def submit(self, slot: int, place: int, due: int, rank: int) -> None:
        """Begin to fill a slot."""
        self._go_on(until := self._now())
        self._free_at = max(self._free_at, until) if not self._waiting else self._free_at
        self.places[slot] = place
        heapq.heappush(self._waiting, Load(due, rank, next(self._count), slot, place))

    def reschedule(self, slot: int, due: int) -> None:
        """Another place in the queue."""
        self._go_on(self._now())
        reschedule(self._waiting, slot, due)

    def finished(self, *, waits: bool) -> list[tuple[int, Exception | None]]:
        """Slots that were filled since the last call."""
        self._go_on(now := self._now())
        if waits and not (self._arriving and self._arriving[0][0] <= now):
            while self._waiting and not self._arriving:
                self._read()
            if self._arriving:
                now = self._wait(self._arriving[0][0])
        found: list[tuple[int, Exception | None]] = []
        while self._arriving and self._arriving[0][0] <= now:
            found.append((self._arriving.pop(0)[1], None))
        return found

    def close(self) -> None:
        """Nothing runs."""

    def _go_on(self, now: float) -> None:
        while self._waiting and self._free_at < now:
            self._read()

    def _read(self) -> None:
        """One chunk of what is most urgent."""
        load = self._waiting[0]
        size = min(self.chunk_bytes, self.bundle_bytes - load.begun)
        load.begun += size
        self._free_at += size / self.bytes_per_s
        if load.begun == self.bundle_bytes:
            heapq.heappop(self._waiting)
            self._arriving.append((self._free_at, load.slot))

    def _wait(self, until: float) -> float:
        while (left := until - (now := self._now())) > 0:
            if left > SPIN_S:
                self._sleep(left - SPIN_S)
        return now


class PacedShelf:
    """Fills ``Shelf`` over experts that are all in memory; for one cache."""

    def __init__(
        self, bundle_bytes: int, places: Mapping[Key, int], experts: Mapping[int, Expert], bytes_per_s: float
    ) -> None:
        """Put them behind a device.

        Args:
            bundle_bytes: of an expert.
            places: where each would lie.
            experts: what lies there.
            bytes_per_s: of the device.
        """
        self.bundle_bytes, self.bytes_per_s = bundle_bytes, bytes_per_s
        self._places, self._experts = places, experts
        self._slots = itertools.count()
        self._device: PacedDevice | None = None

    def place(self, key: Key) -> int:
        """Where an expert would lie."""
        return self._places[key]

    def channel(self, slots: Sequence[memoryview], *, num_threads: int, chunk_bytes: int) -> Channel:
        """The device; it reads a chunk at a time, and slots stay empty."""
        self._device = PacedDevice(self.bundle_bytes, chunk_bytes, self.bytes_per_s)
        return self._device

    def expert(self, layer_bytes: Tensor) -> Expert:
        """Whoever is in the next slot."""
        return _InSlot(self, next(self._slots))

    def at(self, slot: int) -> Expert:
        """The expert in a slot."""
        assert self._device is not None
        return self._experts[self._device.places[slot]]


@dataclass(frozen=True)
class _InSlot:
    shelf: PacedShelf
    slot: int

    def __call__(self, x: Tensor, step: Step, add: Tensor | None = None, /) -> Tensor:
        return self.shelf.at(self.slot)(x, step, add)
