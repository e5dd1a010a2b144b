"""The asynchronous reader: the file's bytes, the most urgent first, and the same errors from threads of either kind."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Iterator
from ctypes import byref
from pathlib import Path

import pytest
import torch

from tests.storage.conftest import SIZE
from tests.storage.stored import broken
from vivace.errors import CheckpointError, CorruptError, UnsupportedError
from vivace.kernels.library import CEnded, found_library
from vivace.storage.io import native_reader
from vivace.storage.io.async_reader import AsyncReader, PendingRead
from vivace.storage.io.native_reader import NativeAsyncReader, open_async_reader
from vivace.storage.io.readers import PAGE, READERS, BufferedReader, Reader, aligned
from vivace.storage.io.thread_reader import ThreadAsyncReader

KINDS = [*(("threads", name) for name in READERS), ("native", "buffered"), ("native", "direct")]


def native(reader: Reader, num_threads: int, chunk_bytes: int) -> NativeAsyncReader:
    library = found_library()
    if library is None:
        pytest.skip("the native reader is not built")
    return NativeAsyncReader(library, reader, num_threads=num_threads, chunk_bytes=chunk_bytes)


@pytest.fixture(params=KINDS, ids="-".join)
def opened(request: pytest.FixtureRequest, path: Path) -> Iterator[AsyncReader]:
    """Cuts at two pages, three reads at once."""
    kind, name = request.param
    try:
        reader = READERS[name](path)
    except UnsupportedError as exc:
        pytest.skip(str(exc))
    made = (
        native(reader, 3, 2 * PAGE)
        if kind == "native"
        else ThreadAsyncReader(reader, num_threads=3, chunk_bytes=2 * PAGE)
    )
    yield made
    made.close()
    reader.close()


def completed(reader: AsyncReader, count: int) -> list[PendingRead]:
    found: list[PendingRead] = []
    while len(found) < count:
        found += reader.completed(waits=True)
    return found


def test_scattered_pages(opened: AsyncReader, content: bytes) -> None:
    places = random.Random(2).sample(range(40), 20)
    memory = aligned(20 * PAGE)
    opened.submit(memory, torch.tensor([(place * PAGE, n * PAGE, PAGE) for n, place in enumerate(places)])).wait()
    assert bytes(memory) == b"".join(content[place * PAGE : (place + 1) * PAGE] for place in places)
    assert (opened.traffic.num_reads, opened.traffic.num_bytes) == (20, 20 * PAGE)
    opened.submit_whole(memory[: 5 * PAGE], 0).wait()
    assert bytes(memory[: 5 * PAGE]) == content[: 5 * PAGE]
    assert opened.traffic.num_reads == 23, "cut at two pages"
    assert 0 < opened.traffic.busy_s < 5
    assert 0 < opened.traffic.wait_s < 5


def test_any_bytes_from_anywhere(opened: AsyncReader, content: bytes) -> None:
    """Parts that are no pages, into places that are none; what lies between them stays as it was."""
    draw = random.Random(3)
    for _ in range(10):
        memory, extents, at = aligned(SIZE), [], draw.choice([0, 3])
        memory[:] = b"." * SIZE
        expected = bytearray(memory)
        while at < SIZE // 2:
            size = draw.choice([0, 1, 5, 511, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE])
            offset = draw.randrange(SIZE - size)
            extents.append((offset, at, size))
            expected[at : at + size] = content[offset : offset + size]
            at += size + draw.choice([0, 7, PAGE])
        opened.submit(memory, torch.tensor(extents)).wait()
        assert bytes(memory) == bytes(expected)


def test_several_reads_are_joined_in_any_order(opened: AsyncReader, content: bytes) -> None:
    memories = [aligned(4 * PAGE) for _ in range(5)]
    reads = [opened.submit_whole(memory, place * PAGE) for place, memory in enumerate(memories)]
    for place in (3, 0, 4, 1, 2):
        reads[place].wait()
        assert bytes(memories[place]) == content[place * PAGE : (place + 4) * PAGE]
        assert reads[place].join() is None, "nothing went wrong, however often it is asked"
    assert opened.submit(memories[0], torch.zeros(0, 3, dtype=torch.int64)).join() is None
    assert opened.completed(waits=True) == [], "all are joined: nobody waits for ever"


def test_completed_reads_are_told_once(opened: AsyncReader, content: bytes) -> None:
    memories = [aligned(5 * PAGE) for _ in range(4)]
    for turn in range(2):
        places = [(number * 2 + turn) * 5 * PAGE for number in range(4)]
        reads = [opened.submit_whole(memory, place) for memory, place in zip(memories, places, strict=True)]
        empty = opened.submit(memories[0], torch.zeros(0, 3, dtype=torch.int64))
        found = completed(opened, 5)
        assert {read.number for read in found} == {read.number for read in (*reads, empty)}
        assert all(read.is_over and read.error is None for read in reads)
        assert [bytes(memory) for memory in memories] == [content[place : place + 5 * PAGE] for place in places]
    assert opened.completed(waits=True) == [], "nothing is under way: nobody waits for ever"


def test_whoever_drops_a_read_does_not_drop_its_memory(opened: AsyncReader, content: bytes) -> None:
    for place in range(20):
        opened.submit_whole(aligned(20 * PAGE), place * PAGE)
    gc.collect()
    memory = aligned(PAGE)
    opened.submit_whole(memory, 0).wait()
    assert bytes(memory) == content[:PAGE]


def test_a_file_that_ends_early(opened: AsyncReader, path: Path, content: bytes) -> None:
    """The first error in the order of what was asked for; what is submitted next is read."""
    os.truncate(path, 10 * PAGE + 7)
    memory = aligned(6 * PAGE)
    expected = f"ends early: {2 * PAGE} bytes were wanted at byte {10 * PAGE}, 7 are"
    with pytest.raises(CorruptError, match=expected):
        opened.submit_whole(memory, 8 * PAGE).wait()
    read = opened.submit_whole(memory, 8 * PAGE)
    assert opened.completed(waits=True) == [read]
    assert isinstance(read.error, CorruptError)
    assert expected in str(read.error)
    opened.submit_whole(memory, 0).wait()
    assert bytes(memory) == content[: 6 * PAGE]


def test_an_error_ends_only_its_own_read(opened: AsyncReader, content: bytes) -> None:
    memories = [aligned(5 * PAGE) for _ in range(3)]
    reads = [opened.submit_whole(memory, place * PAGE) for memory, place in zip(memories, (0, 38, 55), strict=True)]
    assert set(completed(opened, 3)) == set(reads)
    assert reads[0].error is None
    assert bytes(memories[0]) == content[: 5 * PAGE]
    assert all(isinstance(read.error, CorruptError) and "ends early" in str(read.error) for read in reads[1:])


def test_a_broken_device(opened: AsyncReader, tmp_path: Path, content: bytes) -> None:
    if opened.reader.file is None:
        pytest.skip("a map cannot tell")
    with broken(opened.reader, tmp_path):
        read = opened.submit_whole(aligned(PAGE), PAGE)
        with pytest.raises(CheckpointError, match="at byte 4096: Is a directory; check the disk"):
            read.wait()
        assert "Is a directory" in str(read.join()), "however often it is asked"
    memory = aligned(PAGE)
    opened.submit_whole(memory, PAGE).wait()
    assert bytes(memory) == content[PAGE : 2 * PAGE]


class Gated:
    """A reader that stands still until it is let go, and then reads nothing."""

    name, path = "buffered", Path("gated")
    file = None

    def __init__(self) -> None:
        self.gate = threading.Event()

    def read(self, offset: int, into: memoryview) -> None:
        assert self.gate.wait(5)


def urgencies(reader: AsyncReader, memories: list[memoryview]) -> list[PendingRead]:
    """Five reads, of which the first keeps the thread busy."""
    given = zip(memories, [(5, 0), (9, 0), (7, 1), (7, 0), (8, 0)], strict=True)
    reads = [reader.submit_whole(memory, 0, due, rank) for memory, (due, rank) in given]
    reader.reschedule(reads[4], 11)
    return reads


def test_the_most_urgent_is_read_first_by_threads_of_python() -> None:
    gated = Gated()
    reader = ThreadAsyncReader(gated, num_threads=1, chunk_bytes=PAGE)  # type: ignore[arg-type]
    reads = urgencies(reader, [memoryview(bytearray(2 * PAGE)) for _ in range(5)])
    gated.gate.set()
    assert completed(reader, 5) == [reads[place] for place in (0, 3, 2, 1, 4)]
    reader.close()


def test_the_most_urgent_is_read_first_by_native_threads(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 1 << 26)
    file = BufferedReader(path)
    reader = native(file, 1, PAGE)
    reads = urgencies(reader, [aligned(1 << 26), *(aligned(PAGE) for _ in range(4))])
    assert completed(reader, 5) == [reads[place] for place in (0, 3, 2, 1, 4)]
    reader.reschedule(reads[4], 3)  # it is over: nothing to put off
    reader.close()
    file.close()


def test_closing_gives_up_what_has_not_begun(path: Path) -> None:
    for _ in range(20):
        reader = open_async_reader(READERS["buffered"](path), num_threads=1, chunk_bytes=PAGE)
        reader.submit_whole(aligned(SIZE), 0)
        reader.close()


def test_a_native_reader_that_is_dropped_stops(path: Path) -> None:
    if not Path("/proc/self/task").is_dir():
        pytest.skip("the system does not list threads")
    file = BufferedReader(path)
    reader = native(file, 1, PAGE)
    before = len(os.listdir("/proc/self/task"))
    reader.submit_whole(aligned(SIZE), 0)
    del reader
    gc.collect()
    assert len(os.listdir("/proc/self/task")) < before, "its thread is gone, and with it whoever writes to the memory"
    file.close()


@pytest.mark.parametrize("name", READERS)
def test_readers_that_are_dropped_leave_nothing_open(path: Path, name: str) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("the system does not list descriptors")

    def used() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = used()
    for _ in range(3):
        try:
            reader = READERS[name](path)
        except UnsupportedError as exc:
            pytest.skip(str(exc))
        opened = ThreadAsyncReader(reader, num_threads=2)
        opened.submit_whole(aligned(SIZE), 0).wait()
        opened.submit_whole(aligned(SIZE), 0)  # read in vain
        threads = list(opened._threads)
        del opened, reader
        gc.collect()
        for thread in threads:
            thread.join(5)
        del threads
    assert used() == before


@pytest.mark.parametrize("waits", ["join", "completed"])
def test_a_read_whose_end_was_lost_in_an_interrupt_is_over(path: Path, waits: str) -> None:
    """The native call takes the batch off its list; an exception then keeps Python from seeing which it was."""
    reader = BufferedReader(path)
    opened = native(reader, 1, PAGE)
    lost, kept = opened.submit_whole(aligned(SIZE), 0), opened.submit_whole(aligned(SIZE), 0)
    ended = CEnded()
    opened._library.vivace_reader_wait(opened._handle, lost.number, byref(ended))
    if waits == "join":
        assert isinstance(lost.join(), CheckpointError)
        assert kept.join() is None
    else:
        assert opened.completed(waits=True) == [kept]
        assert opened.completed(waits=True) == [lost]
        assert isinstance(lost.error, CheckpointError)
    assert opened.completed(waits=True) == []
    opened.close()
    reader.close()


def test_without_native_code(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_reader, "found_library", lambda: None)
    reader = open_async_reader(READERS["buffered"](path))
    assert isinstance(reader, ThreadAsyncReader)
    reader.close()


def test_a_map_is_read_by_threads_of_python(path: Path) -> None:
    reader = open_async_reader(READERS["mmap"](path))
    assert isinstance(reader, ThreadAsyncReader)
    reader.close()
