"""Loads into slots of memory: the file's bytes in the order of urgency, through both channels."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vivace.errors import CheckpointError, CorruptError, VivaceError
from vivace.kernels.library import found_library
from vivace.storage.channel import Channel, NativeChannel, ThreadChannel
from vivace.storage.readers import PAGE, BufferedReader, DirectReader, Reader, aligned

SIZE = 5 * PAGE
NUM_BUNDLES = 9


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("channel") / "file"
    path.write_bytes(os.urandom(NUM_BUNDLES * SIZE))
    return path


def direct(path: Path) -> Reader:
    try:
        return DirectReader(path)
    except VivaceError:
        pytest.skip("no direct reads here")


@contextmanager
def opened(kind: str, path: Path, slots: list[memoryview]) -> Iterator[Channel]:
    reader: Reader = direct(path) if kind == "native direct" else BufferedReader(path)
    channel: Channel
    if kind == "threads":
        channel = ThreadChannel(reader.read, slots, chunk_bytes=PAGE)
        yield channel
        channel.close()
        reader.close()
        return
    library = found_library()
    if library is None or reader.file is None:
        pytest.skip("the native channel is not built")
    channel = NativeChannel(library, reader.file, path, slots, chunk_bytes=PAGE)
    reader.close()  # the channel has a descriptor of its own
    yield channel
    channel.close()


def all_of(channel: Channel, count: int) -> list[tuple[int, Exception | None]]:
    found: list[tuple[int, Exception | None]] = []
    while len(found) < count:
        found += channel.finished(waits=True)
    return found


KINDS = pytest.mark.parametrize("kind", ["threads", "native", "native direct"])


@KINDS
def test_slots_get_the_bytes_of_their_places(kind: str, path: Path) -> None:
    slots, whole = [aligned(SIZE) for _ in range(4)], path.read_bytes()
    with opened(kind, path, slots) as channel:
        for turn in range(2):
            places = [(slot * 2 + turn) * SIZE for slot in range(4)]
            for slot, place in enumerate(places):
                channel.submit(slot, place, slot, 0)
            assert sorted(all_of(channel, 4), key=lambda each: each[0]) == [(slot, None) for slot in range(4)]
            assert [bytes(slot) for slot in slots] == [whole[place : place + SIZE] for place in places]
        assert channel.finished(waits=True) == [], "nothing is under way: nobody waits for ever"


@KINDS
def test_a_file_that_ends_early_is_an_error_of_that_load(kind: str, path: Path) -> None:
    slots = [aligned(SIZE) for _ in range(3)]
    with opened(kind, path, slots) as channel:
        for slot, bundle in enumerate([0, NUM_BUNDLES - 0.5, NUM_BUNDLES + 3]):
            channel.submit(slot, int(bundle * SIZE) // PAGE * PAGE, 0, slot)
        found = dict(all_of(channel, 3))
        assert found[0] is None
        assert all(isinstance(found[slot], CorruptError) and "ends early" in str(found[slot]) for slot in (1, 2))
        channel.submit(1, SIZE, 0, 0)
        assert all_of(channel, 1) == [(1, None)], "and the slot can be filled again"


def test_an_error_of_the_system_says_where() -> None:
    library = found_library()
    if library is None:
        pytest.skip("the native channel is not built")
    folder = os.open(os.sep, os.O_RDONLY)  # can be opened, not read
    channel = NativeChannel(library, folder, Path("weights"), [aligned(PAGE)])
    os.close(folder)
    channel.submit(0, PAGE, 0, 0)
    [(slot, error)] = all_of(channel, 1)
    assert slot == 0
    assert isinstance(error, CheckpointError)
    assert "weights could not be read at byte 4096: Is a directory" in str(error)
    channel.close()


def order(channel: Channel, count: int) -> list[int]:
    return [slot for slot, _ in all_of(channel, count)]


def test_what_is_due_first_comes_first_in_a_file(tmp_path: Path) -> None:
    library = found_library()
    if library is None:
        pytest.skip("the native channel is not built")
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 1 << 26)
    slots = [aligned(1 << 26), *(aligned(PAGE) for _ in range(4))]  # the first keeps the thread busy
    reader = BufferedReader(path)
    channel = NativeChannel(library, reader.file, path, slots, num_threads=1, chunk_bytes=PAGE)
    reader.close()
    for slot, (due, rank) in enumerate([(5, 0), (9, 0), (7, 1), (7, 0), (8, 0)]):
        channel.submit(slot, slot * PAGE if slot else 0, due, rank)
    channel.reschedule(4, 10)
    channel.reschedule(4, 11)
    assert order(channel, 5) == [0, 3, 2, 1, 4]
    channel.reschedule(4, 3)  # it is there: nothing to put off
    channel.close()


def test_what_is_due_first_comes_first_in_threads() -> None:
    gate = threading.Event()
    slots = [memoryview(bytearray(2 * PAGE)) for _ in range(5)]
    channel = ThreadChannel(lambda place, into: gate.wait(5) and None, slots, num_threads=1, chunk_bytes=PAGE)
    for slot, (due, rank) in enumerate([(5, 0), (9, 0), (7, 1), (7, 0), (8, 0)]):
        channel.submit(slot, 0, due, rank)
    channel.reschedule(4, 11)
    gate.set()
    assert order(channel, 5) == [0, 3, 2, 1, 4]
    channel.close()


def test_a_channel_that_is_let_go_of_stops(path: Path) -> None:
    slots = [aligned(SIZE)]
    library = found_library()
    if library is None:
        pytest.skip("the native channel is not built")
    reader = BufferedReader(path)
    channel = NativeChannel(library, reader.file, path, slots, num_threads=1)
    reader.close()
    before = len(os.listdir("/proc/self/task")) if Path("/proc/self/task").is_dir() else None
    channel.submit(0, 0, 0, 0)
    del channel
    gc.collect()
    if before is not None:
        assert len(os.listdir("/proc/self/task")) < before, "its thread is gone, and with it whoever writes to the slot"
