"""Pools: scattered and long reads at once, the same bytes and the same errors with threads of either kind."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.storage.conftest import SIZE
from tests.storage.stored import broken
from vivace.errors import CheckpointError, CorruptError, UnsupportedError
from vivace.kernels.library import found_library
from vivace.storage import pools
from vivace.storage.pools import NativePool, Pool, ThreadPool, open_pool, whole
from vivace.storage.readers import PAGE, READERS, aligned

KINDS = [*(("threads", name) for name in READERS), ("native", "buffered"), ("native", "direct")]


@pytest.fixture(params=KINDS, ids="-".join)
def pool(request: pytest.FixtureRequest, path: Path) -> Iterator[Pool]:
    """Cuts at two pages, three reads at once."""
    kind, name = request.param
    try:
        reader = READERS[name](path)
    except UnsupportedError as exc:
        pytest.skip(str(exc))
    library = found_library()
    opened: Pool
    if kind == "threads":
        opened = ThreadPool(reader, num_threads=3, chunk_bytes=2 * PAGE)
    elif library is None:
        pytest.skip("the native pool is not built")
    else:
        opened = NativePool(library, reader, num_threads=3, chunk_bytes=2 * PAGE)
    yield opened
    opened.close()
    reader.close()


def test_scattered_pages(pool: Pool, content: bytes) -> None:
    places = random.Random(2).sample(range(40), 20)
    memory = aligned(20 * PAGE)
    pool.submit(memory, torch.tensor([(place * PAGE, n * PAGE, PAGE) for n, place in enumerate(places)])).wait()
    assert bytes(memory) == b"".join(content[place * PAGE : (place + 1) * PAGE] for place in places)
    assert (pool.traffic.num_reads, pool.traffic.num_bytes) == (20, 20 * PAGE)
    pool.submit(*whole(0, memory[: 5 * PAGE])).wait()
    assert bytes(memory[: 5 * PAGE]) == content[: 5 * PAGE]
    assert pool.traffic.num_reads == 23, "cut at two pages"
    assert 0 < pool.traffic.busy_s < 5
    assert 0 < pool.traffic.wait_s < 5


def test_any_bytes_from_anywhere(pool: Pool, content: bytes) -> None:
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
        pool.submit(memory, torch.tensor(extents)).wait()
        assert bytes(memory) == bytes(expected)


def test_several_tickets_in_any_order(pool: Pool, content: bytes) -> None:
    memories = [aligned(4 * PAGE) for _ in range(5)]
    tickets = [pool.submit(*whole(place * PAGE, memory)) for place, memory in enumerate(memories)]
    for place in (3, 0, 4, 1, 2):
        tickets[place].wait()
        assert bytes(memories[place]) == content[place * PAGE : (place + 4) * PAGE]
        assert tickets[place].settle() is None, "nothing went wrong, however often it is asked"
    assert pool.submit(memories[0], torch.zeros(0, 3, dtype=torch.int64)).settle() is None


def test_who_forgets_a_ticket_does_not_forget_its_memory(pool: Pool, content: bytes) -> None:
    for place in range(20):
        pool.submit(*whole(place * PAGE, aligned(20 * PAGE)))
    gc.collect()
    memory = aligned(PAGE)
    pool.submit(*whole(0, memory)).wait()
    assert bytes(memory) == content[:PAGE]


def test_a_file_that_ends_early(pool: Pool, path: Path, content: bytes) -> None:
    """The first error in the order of what was asked for; what comes after is read."""
    os.truncate(path, 10 * PAGE + 7)
    memory = aligned(6 * PAGE)
    with pytest.raises(CorruptError, match=f"ends early: {2 * PAGE} bytes were wanted at byte {10 * PAGE}, 7 are"):
        pool.submit(*whole(8 * PAGE, memory)).wait()
    pool.submit(*whole(0, memory)).wait()
    assert bytes(memory) == content[: 6 * PAGE]


def test_a_broken_device(pool: Pool, tmp_path: Path, content: bytes) -> None:
    if pool.reader.file is None:
        pytest.skip("a map cannot tell")
    with broken(pool.reader, tmp_path):
        ticket = pool.submit(*whole(PAGE, aligned(PAGE)))
        with pytest.raises(CheckpointError, match="at byte 4096: Is a directory; check the disk"):
            ticket.wait()
        assert "Is a directory" in str(ticket.settle()), "however often it is asked"
    memory = aligned(PAGE)
    pool.submit(*whole(PAGE, memory)).wait()
    assert bytes(memory) == content[PAGE : 2 * PAGE]


def test_closing_gives_up_what_has_not_begun(path: Path) -> None:
    for _ in range(20):
        pool = open_pool(READERS["buffered"](path), num_threads=1, chunk_bytes=PAGE)
        memory = aligned(SIZE)
        pool.submit(*whole(0, memory))
        pool.close()


def test_without_native_code(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "found_library", lambda: None)
    assert isinstance(open_pool(READERS["buffered"](path)), ThreadPool)


def test_a_map_is_read_by_threads_of_python(path: Path) -> None:
    assert isinstance(open_pool(READERS["mmap"](path)), ThreadPool)
