"""The folder of a prompt cache under several processes that write, are killed, or may not."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vivace.errors import ConfigError, NotFoundError
from vivace.storage.prompt_cache import directory as module
from vivace.storage.prompt_cache.block_file import BlockHeader, checksum_of
from vivace.storage.prompt_cache.directory import BlockDirectory, StoredBlock, checked_limit, name_of

MODEL = {"base": "a"}
ROOT = "0" * 64
LIMIT = 100_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prompts"


def content(token: int, num_bytes: int) -> bytes:
    return random.Random(token).randbytes(num_bytes)


def add(blocks: BlockDirectory, token: int, above: str = ROOT, num_bytes: int = 5000) -> StoredBlock | None:
    part = memoryview(content(token, num_bytes))
    header = BlockHeader(MODEL, above, 0, (token,), (0,), "float32", 1, num_bytes, checksum_of([part]))
    try:
        with blocks.writing():
            return blocks.add(header, [part], {above})
    except OSError as error:
        blocks.tell(error)
        return None


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def check(folder: Path) -> int:
    """Everything that a folder says it has is what was written; returns how many blocks that is."""
    blocks = BlockDirectory(folder, MODEL, max_bytes=LIMIT)
    for block in blocks.beside(ROOT):
        found = blocks.read(block)
        assert found == content(block.header.tokens[0], len(found or b""))
        assert found is not None
    return blocks.num_blocks


@pytest.mark.slow
def test_a_thousand_prompts_never_take_more_than_the_limit(folder: Path) -> None:
    blocks = BlockDirectory(folder, MODEL, max_bytes=LIMIT)
    draw = random.Random(0)
    for token in range(1000):
        assert add(blocks, token, num_bytes=draw.randrange(1, 9000)) is not None
        assert size(folder) <= LIMIT
    assert blocks.num_bytes == size(folder)
    assert check(folder) == blocks.num_blocks > 5


def test_the_least_recently_used_leave_first(folder: Path) -> None:
    blocks = BlockDirectory(folder, MODEL, max_bytes=3 * 5500)
    first, *_ = [add(blocks, token) for token in (1, 2, 3)]
    assert first is not None
    BlockDirectory(folder, MODEL, max_bytes=LIMIT).touch([first])  # by another process
    add(blocks, 4)
    assert sorted(block.header.tokens[0] for block in blocks.beside(ROOT)) == [1, 3, 4]


def test_what_leads_to_a_block_leaves_after_it(folder: Path) -> None:
    blocks = BlockDirectory(folder, MODEL, max_bytes=3 * 5500)
    first = add(blocks, 1)
    assert first is not None
    second = add(blocks, 2, above=first.name)
    assert second is not None
    blocks.touch([first, second])
    add(blocks, 3)
    add(blocks, 4)
    assert blocks.find(ROOT, first.header.key) is not None
    assert blocks.find(first.name, second.header.key) is None


def test_blocks_of_another_process_are_found(folder: Path) -> None:
    one, other = (BlockDirectory(folder, MODEL, max_bytes=LIMIT) for _ in range(2))
    block = add(one, 5)
    assert block is not None
    assert other.find(ROOT, block.header.key) == block
    add(other, 6)
    assert add(one, 7) is not None
    assert len(one.beside(ROOT)) == 3


def write_many(folder: Path, first: int, count: int) -> None:
    blocks = BlockDirectory(folder, MODEL, max_bytes=LIMIT)
    for token in range(first, first + count):
        add(blocks, token, num_bytes=4000 + token % 3000)


@pytest.fixture
def processes() -> Iterator[list[multiprocessing.process.BaseProcess]]:
    started: list[multiprocessing.process.BaseProcess] = []
    yield started
    for process in started:
        process.kill()
        process.join()


def test_two_writers_take_turns(folder: Path, processes: list[multiprocessing.process.BaseProcess]) -> None:
    fork = multiprocessing.get_context("fork")
    for first in (0, 50):
        processes.append(fork.Process(target=write_many, args=(folder, first, 60)))
        processes[-1].start()
    while any(process.is_alive() for process in processes):
        if folder.exists():
            try:
                assert size(folder) <= LIMIT
            except FileNotFoundError:  # a block left between the list and the look
                continue
    assert [process.exitcode for process in processes] == [0, 0]
    assert check(folder) > 5
    assert size(folder) <= LIMIT


def test_a_writer_that_is_killed_leaves_a_folder_that_works(
    folder: Path, processes: list[multiprocessing.process.BaseProcess]
) -> None:
    fork = multiprocessing.get_context("fork")
    for turn in range(5):
        process = fork.Process(target=write_many, args=(folder, 1000 * turn, 10**6))
        processes.append(process)
        process.start()
        while not folder.exists():  # on a busy machine the first writer takes long to begin
            time.sleep(0.01)
        time.sleep(0.05 + 0.013 * turn)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert size(folder) <= LIMIT
        check(folder)
    (folder / f".{'a' * 64}.block.99.partial").write_bytes(b"half a block")
    assert add(BlockDirectory(folder, MODEL, max_bytes=LIMIT), 7) is not None
    assert not list(folder.glob("*.partial")), "what was left is gone with the next block"


def test_a_full_disk_is_said_once_and_harms_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = BlockDirectory(folder, MODEL, max_bytes=LIMIT)
    add(blocks, 1)

    def full(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_block", full)
        assert add(blocks, 2) is None
        assert add(blocks, 3) is None
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"prompt cache {folder}: no prompts are added: No space left on device"]
    assert not list(folder.glob("*.partial"))
    assert add(blocks, 4) is not None
    assert check(folder) == 2


def test_what_is_only_read_does_not_change(folder: Path) -> None:
    block = add(BlockDirectory(folder, MODEL, max_bytes=LIMIT), 1)
    assert block is not None
    (folder / f"{'b' * 64}.block").write_bytes(b"damaged")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    reader = BlockDirectory(folder, MODEL, max_bytes=LIMIT, is_read_only=True)
    assert reader.read(block) == content(1, 5000)
    reader.touch([block])
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before


def test_a_folder_that_may_not_be_written_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    block = add(BlockDirectory(folder, MODEL, max_bytes=LIMIT), 1)
    assert block is not None
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    reader = BlockDirectory(folder, MODEL, max_bytes=LIMIT)
    assert reader.is_read_only
    assert "may not be written" in caplog.records[0].getMessage()
    assert reader.read(block) == content(1, 5000)


def test_a_disk_that_became_read_only_is_said_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = BlockDirectory(folder, MODEL, max_bytes=LIMIT)

    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    assert add(blocks, 1) is None
    assert add(blocks, 2) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"prompt cache {folder}: no prompts are added: Read-only file system"
    ]


def test_a_name_with_another_content_is_damaged(folder: Path) -> None:
    blocks = BlockDirectory(folder, MODEL, max_bytes=LIMIT)
    one = add(blocks, 1)
    assert one is not None
    path = folder / f"{one.name}.block"
    path.rename(folder / f"{name_of(ROOT, bytes(8))}.block")
    assert BlockDirectory(folder, MODEL, max_bytes=LIMIT).find(ROOT, bytes(8)) is None


def test_places_that_cannot_be_a_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        BlockDirectory(tmp_path / "file", MODEL, max_bytes=1)
    with pytest.raises(ConfigError, match="cannot be made"):
        BlockDirectory(tmp_path / "file" / "below", MODEL, max_bytes=1)
    with pytest.raises(NotFoundError, match="there is no prompt cache"):
        BlockDirectory(tmp_path / "none", MODEL, max_bytes=1, is_read_only=True)
    with pytest.raises(ConfigError, match=r"is 10 B, and one block takes 1\.0 KiB"):
        checked_limit(10, 1024)


def test_a_block_that_cannot_be_read_now_stays_and_is_read_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a process has too many files open: the block is as it was."""
    blocks = BlockDirectory(folder, MODEL, max_bytes=LIMIT)
    block = add(blocks, 1)
    assert block is not None

    def busy(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(module, "read_block", busy)
        assert blocks.read(block) is None
        assert "Too many open files" in caplog.text
        assert blocks.find(ROOT, block.header.key) is None, "it is not asked for again and again"
    assert add(blocks, 2) is not None
    found = blocks.find(ROOT, block.header.key)
    assert found is not None
    assert blocks.read(found) == content(1, 5000)


def test_a_damaged_block_that_may_not_be_removed_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the file is another user's."""
    blocks = BlockDirectory(folder, MODEL, max_bytes=LIMIT)
    block = add(blocks, 1)
    assert block is not None
    path = blocks._path(block.name)
    path.write_bytes(path.read_bytes()[:-1] + b"x")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refused)
    assert blocks.read(block) is None
    assert blocks.find(ROOT, block.header.key) is None
    assert path.exists()


def test_a_folder_that_may_not_be_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="may not be read; name another folder"):
        BlockDirectory(folder, MODEL, max_bytes=LIMIT)


def test_blocks_are_for_their_owner_alone_whatever_the_folder_is(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    blocks = BlockDirectory(folder, MODEL, max_bytes=LIMIT)
    block = add(blocks, 1)
    assert block is not None
    assert blocks._path(block.name).stat().st_mode & 0o077 == 0
