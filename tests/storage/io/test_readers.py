"""Readers: the same bytes however they are read, and errors where there are none."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.conftest import SIZE
from vivace.errors import CheckpointError, ConfigError, CorruptError, UnsupportedError
from vivace.storage.io import readers
from vivace.storage.io.probing import device_bytes, drop_cached, open_reader
from vivace.storage.io.readers import PAGE, READERS, Reader, aligned


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, path: Path) -> Iterator[Reader]:
    try:
        opened = open_reader(path, request.param).reader
    except UnsupportedError as exc:
        pytest.skip(str(exc))
    yield opened
    opened.close()


def test_the_same_bytes(reader: Reader, content: bytes) -> None:
    draw = random.Random(1)
    memory = aligned(SIZE)
    for _ in range(60):
        offset = draw.randrange(SIZE - 1)
        size = min(draw.choice([1, 5, 511, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE]), SIZE - offset)
        at = draw.choice([0, 3, PAGE])
        into = memory[at : at + size] if at + size <= SIZE else memory[:size]
        reader.read(offset, into)
        assert bytes(into) == content[offset : offset + size], (offset, size, at)


def test_whole_pages(reader: Reader, content: bytes) -> None:
    memory = aligned(8 * PAGE)
    reader.read(3 * PAGE, memory)
    assert bytes(memory) == content[3 * PAGE : 11 * PAGE]


def test_short_reads_are_asked_again(path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, at: whole(file, [into[0][:1000]], at))
    memory = aligned(2 * PAGE)
    open_reader(path, "buffered").reader.read(PAGE, memory)
    assert bytes(memory) == content[PAGE : 3 * PAGE]


@pytest.mark.parametrize("kind", ["direct", "buffered"])
def test_a_broken_device(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = open_reader(path, kind).reader

    def broken(file: int, into: list[memoryview], at: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match="at byte 4096: Input/output error; check"):
        reader.read(PAGE, aligned(PAGE))


def test_a_file_that_ends_early(reader: Reader, path: Path) -> None:
    os.truncate(path, 10 * PAGE + 7)
    with pytest.raises(CorruptError, match=f"ends early: {PAGE} bytes were wanted at byte {10 * PAGE}, 7 are"):
        reader.read(10 * PAGE, aligned(PAGE))


def test_auto_measures_and_says_so(path: Path) -> None:
    choice = open_reader(path)
    assert choice.gb_per_s is not None
    assert all(name in choice.why for name in ("buffered", "mmap", "GB/s from a cold cache"))


@pytest.mark.parametrize("reason", ["system", "file system"])
def test_without_direct_reads(path: Path, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "system":
        monkeypatch.delattr(os, "O_DIRECT")
    else:
        opened = os.open

        def refusing(name: Path, flags: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(22, "Invalid argument")
            return opened(name, flags)

        monkeypatch.setattr(readers.os, "open", refusing)
    choice = open_reader(path)
    assert choice.reader.name in ("buffered", "mmap")
    assert ("no O_DIRECT" if reason == "system" else "refuses O_DIRECT (Invalid argument)") in choice.why
    with pytest.raises(UnsupportedError):
        open_reader(path, "direct")


def test_an_unknown_reader(path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'mmap'"):
        open_reader(path, "map")


def test_the_kernel_counts_direct_reads(path: Path) -> None:
    if device_bytes() is None:
        pytest.skip("/proc/self/io is not there")
    try:
        reader = open_reader(path, "direct").reader
    except UnsupportedError as exc:
        pytest.skip(str(exc))
    drop_cached(path)
    before = device_bytes()
    reader.read(0, aligned(SIZE))
    after = device_bytes()
    assert before is not None
    assert after is not None
    assert SIZE <= after - before <= SIZE + 64 * PAGE
