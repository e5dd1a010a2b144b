"""Loads into slots of memory: whoever decides submits them with an urgency, threads read the most urgent chunk first.

A load is cut into chunks, so that a demand overtakes a guess at the next one. Two channels do the same:
``ThreadChannel`` over anything that can be read, with threads of Python, and ``NativeChannel`` over a file, with
threads that never ask the interpreter for a turn. Decoding is small operations called from Python; threads of Python
that take turns between them cost it a third of its speed (measured).
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_int64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from vivace.errors import VivaceError
from vivace.kernels.library import DAMAGED, ENDED, CRead
from vivace.storage.checksums import PageSums
from vivace.storage.readers import PAGE, address, truncated, unreadable

NUM_THREADS = 4
CHUNK_BYTES = 512 * 1024


class Channel(Protocol):
    """Reads under way; one thread at a time submits and asks."""

    def submit(self, slot: int, place: int, due: int, rank: int) -> None:
        """Begin to fill a slot from a place in the file; what is due first is read first."""
        ...

    def reschedule(self, slot: int, due: int) -> None:
        """It is due at another time than was said, unless all of it is being read already."""
        ...

    def finished(self, *, waits: bool) -> list[tuple[int, Exception | None]]:
        """Slots that were filled, or could not be, since the last call.

        Args:
            waits: until there is one, if any load is under way.
        """
        ...

    def close(self) -> None:
        """Stop the threads; no slot is touched afterwards."""
        ...


@dataclass(order=True)
class Load:
    """A slot that waits in a heap, the most urgent first."""

    due: int
    rank: int
    number: int
    slot: int = field(compare=False)
    place: int = field(compare=False)
    begun: int = field(default=0, compare=False)
    under_way: int = field(default=0, compare=False)
    error: Exception | None = field(default=None, compare=False)


def reschedule(waiting: list[Load], slot: int, due: int) -> None:
    """Another place in the heap for whatever fills a slot, if it waits there."""
    for load in waiting:
        if load.slot == slot:
            load.due = due
    heapq.heapify(waiting)


class ThreadChannel:
    """Fills ``Channel`` for whatever reads into memory."""

    def __init__(
        self,
        read: Callable[[int, memoryview], None],
        slots: Sequence[memoryview],
        *,
        num_threads: int = NUM_THREADS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Start the threads.

        Args:
            read: fills memory from a place on; called from several threads.
            slots: what is filled.
            num_threads: reads under way at once.
            chunk_bytes: of one read at most, a multiple of 4096.
        """
        assert chunk_bytes % PAGE == 0, chunk_bytes
        self._read, self._slots, self._chunk_bytes = read, slots, chunk_bytes
        self._waiting: list[Load] = []
        self._finished: list[tuple[int, Exception | None]] = []
        self._pending = 0
        self._number = itertools.count()
        self._is_closed = False
        lock = threading.Lock()
        self._asked, self._arrived = threading.Condition(lock), threading.Condition(lock)
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, slot: int, place: int, due: int, rank: int) -> None:
        """Begin to fill a slot."""
        with self._asked:
            self._pending += 1
            heapq.heappush(self._waiting, Load(due, rank, next(self._number), slot, place))
            self._asked.notify(-(-len(self._slots[slot]) // self._chunk_bytes))

    def reschedule(self, slot: int, due: int) -> None:
        """Another place in the queue."""
        with self._asked:
            reschedule(self._waiting, slot, due)

    def finished(self, *, waits: bool) -> list[tuple[int, Exception | None]]:
        """Slots that were filled, or could not be."""
        with self._arrived:
            if waits:
                self._arrived.wait_for(lambda: self._finished or not self._pending)
            found, self._finished = self._finished, []
            return found

    def close(self) -> None:
        """Stop the threads."""
        with self._asked:
            self._is_closed = True
            self._asked.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._asked:
                self._asked.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                load = self._waiting[0]
                first, memory = load.begun, self._slots[load.slot]
                stop = load.begun = min(first + self._chunk_bytes, len(memory))
                load.under_way += 1
                if stop == len(memory):
                    heapq.heappop(self._waiting)
            error: Exception | None = None
            try:
                self._read(load.place + first, memory[first:stop])
            except (OSError, VivaceError) as exc:
                error = exc
            with self._arrived:
                self._end(load, error)

    def _end(self, load: Load, error: Exception | None) -> None:
        whole = len(self._slots[load.slot])
        load.under_way -= 1
        if error is not None and load.error is None:
            load.error = error
            if load.begun < whole:  # the rest is of no use
                load.begun = whole
                self._waiting.remove(load)
                heapq.heapify(self._waiting)
        if not load.under_way and load.begun == whole:
            self._pending -= 1
            self._finished.append((load.slot, load.error))
            self._arrived.notify_all()


class NativeChannel:
    """Fills ``Channel`` for a file, on a system that the native kernels are built for."""

    def __init__(
        self,
        library: ctypes.CDLL,
        file: int,
        path: Path,
        slots: Sequence[memoryview],
        *,
        num_threads: int = NUM_THREADS,
        chunk_bytes: int = CHUNK_BYTES,
        pages: PageSums | None = None,
    ) -> None:
        """Start the threads; the file may be closed afterwards.

        Args:
            library: with the native channel.
            file: its descriptor. Places and chunks are whole pages where it is read directly.
            path: for messages.
            slots: what is filled.
            num_threads: reads under way at once.
            chunk_bytes: of one read at most, a multiple of 4096.
            pages: checksums that every page is compared with; places and sizes are whole pages then.
        """
        assert chunk_bytes % PAGE == 0, chunk_bytes
        self._library, self._path, self._pages = library, path, pages
        self._places = [0] * len(slots)
        self._slots = [(address(memory), len(memory)) for memory in slots]
        self._room = 2 * len(slots)
        self._out = (c_int64 * self._room)()
        table = (None, 0) if pages is None else (pages.address, pages.count)
        handle = library.vivace_channel_open(file, num_threads, chunk_bytes, *table)
        self._handle = ctypes.c_void_p(handle)
        self.close = weakref.finalize(self, _close, library, self._handle, (slots, pages))
        """Stop the threads, which hold on to the slots until then."""

    def submit(self, slot: int, place: int, due: int, rank: int) -> None:
        """Begin to fill a slot."""
        into, size = self._slots[slot]
        self._places[slot] = place
        self._library.vivace_channel_submit(self._handle, byref(CRead(slot, place, size, into, due, rank)))

    def reschedule(self, slot: int, due: int) -> None:
        """Another place in the queue."""
        self._library.vivace_channel_reschedule(self._handle, slot, due)

    def finished(self, *, waits: bool) -> list[tuple[int, Exception | None]]:
        """Slots that were filled, or could not be."""
        count = self._library.vivace_channel_finished(self._handle, self._out, self._room // 2, waits)
        if not count:
            return []
        told = self._out[: 2 * count]
        return [(slot, self._error(slot, error)) for slot, error in zip(told[::2], told[1::2], strict=True)]

    def _error(self, slot: int, number: int) -> Exception | None:
        if number == 0:
            return None
        place, size = self._places[slot], self._slots[slot][1]
        if number == DAMAGED:
            assert self._pages is not None
            return self._pages.damaged(place)
        if number == ENDED:
            return truncated(self._path, place, size, max(0, self._path.stat().st_size - place))
        return unreadable(self._path, place, os.strerror(number))


def _close(library: ctypes.CDLL, handle: ctypes.c_void_p, _kept: object) -> None:
    library.vivace_channel_close(handle)
