"""The folder of a prompt cache: which blocks it has, which leave when it is full, and who may write.

A block's name is a digest of its model, of the text in front of it and of its tokens, so that every process gives a
block the same name; what is found under a name is compared with the tokens that were asked for. Headers are read when
the folder is opened and entries when they are used. The time of a file is when it was last used.

Processes that write take turns, by a lock on a file in the folder; what the last one has left unfinished is removed by
the next. Those that only read take no lock: a block is complete or not there, and one that leaves while it is wanted is
as good as one that never was.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vivace.errors import ConfigError, CorruptError, MismatchError, NotFoundError
from vivace.files import HAS_LOCKS, lock, replacing
from vivace.storage.prompt_cache.block_file import BlockHeader, encoded, read_block, read_header, write_block
from vivace.units import format_bytes

log = logging.getLogger(__name__)

DIGESTS = ("base", "store", "shape")
"""Facts of a model that are digests, which tell a reader nothing."""
SUFFIX = ".block"
LOCK = ".lock"
_BLOCK = re.compile(r"[0-9a-f]{64}\.block")
_PARTIAL = re.compile(r"\.[0-9a-f]{64}\.block\.\d+\.partial")
_FOLDER_MODE = 0o700
"""Prompts are for nobody else on the machine."""


class _File(NamedTuple):
    """A file of the folder, whatever is in it."""

    num_bytes: int
    used_at: int
    """Nanoseconds."""


@dataclass(frozen=True)
class StoredBlock:
    """A block that may be used."""

    name: str
    header: BlockHeader


def name_of(above: str, key: bytes) -> str:
    """Return the name of the stretch with these tokens (eight bytes each) behind ``above``."""
    return hashlib.sha256(bytes.fromhex(above) + key).hexdigest()


class BlockDirectory:
    """Blocks of one model in a folder that may have those of others, of ``max_bytes`` together."""

    def __init__(self, path: Path, model: Mapping[str, str], *, max_bytes: int, is_read_only: bool = False) -> None:
        """Open a folder, or make it.

        Args:
            path: the folder.
            model: what bits depend on besides the text.
            max_bytes: of all files together.
            is_read_only: whether nothing is ever written, touched or removed.

        Raises:
            ConfigError: the path is a file, or the folder cannot be made, or may not be read.
            NotFoundError: it is only to be read, and not there.
        """
        self.path, self.model, self.max_bytes, self.is_read_only = path, dict(model), max_bytes, is_read_only
        self._files: dict[str, _File] = {}
        self._blocks: dict[str, StoredBlock] = {}
        self._below: dict[str, set[str]] = {}
        """Names of the blocks that follow each name."""
        self._left_out: set[str] = set()
        """Names of files that are damaged or of another model."""
        self._unread: set[str] = set()
        """Names of files that could not be read, as where too many are open; they are tried again when the folder is
        looked at next."""
        self._clock = 0
        self._failure: str | None = None
        self._lock = threading.RLock()
        self._open()

    def _open(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"prompt cache {self.path} is a file; name a folder")
        if not self.path.exists():
            if self.is_read_only:
                raise NotFoundError(f"there is no prompt cache {self.path}; make one without --prompt-cache-ro")
            try:
                self.path.mkdir(parents=True, mode=_FOLDER_MODE)
            except OSError as error:
                raise ConfigError(f"prompt cache {self.path} cannot be made: {error.strerror}") from error
        if not self.is_read_only and not os.access(self.path, os.W_OK | os.X_OK):
            log.warning("prompt cache %s may not be written: prompts are found in it and none is added", self.path)
            self.is_read_only = True
        if not os.access(self.path, os.R_OK | os.X_OK):
            raise ConfigError(f"prompt cache {self.path} may not be read; name another folder")
        self._refresh(tells=True)

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks that may be used."""
        return len(self._blocks)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all files that are known, those of other models included."""
        with self._lock:
            return sum(file.num_bytes for file in self._files.values())

    # Finding and reading

    def find(self, above: str, key: bytes) -> StoredBlock | None:
        """Return the block of these tokens behind ``above``; another process may have just written it."""
        name = name_of(above, key)
        with self._lock:
            found = self._blocks.get(name)
            if found is None and name not in self._left_out and name not in self._unread:
                found = self._look_at(name)
            return found if found is not None and found.header.key == key and found.header.above == above else None

    def beside(self, above: str) -> list[StoredBlock]:
        """Return all blocks behind ``above``."""
        with self._lock:
            return [self._blocks[name] for name in self._below.get(above, ())]

    def read(self, block: StoredBlock, *, tells: bool = True) -> bytearray | None:
        """Return residuals and entries of a block; None where it is gone, damaged, or cannot be read now, which one
        line tells. Only a damaged one is removed.
        """
        try:
            return read_block(self._path(block.name), block.header)
        except FileNotFoundError:
            pass
        except (CorruptError, MismatchError, OSError) as error:
            if tells:
                log.warning("prompt cache %s: block %s is read anew: %s", self.path, block.name[:12], error)
            if not isinstance(error, OSError):
                self._remove(block.name)
                return None
            self._unread.add(block.name)
        with self._lock:
            self._forget(block.name)
        return None

    def touch(self, blocks: Sequence[StoredBlock]) -> None:
        """Note that the blocks of a text were used: the last one leaves first, as the others lead to it."""
        if not self.is_read_only:
            for block in reversed(blocks):
                self._touch(block.name)

    # Writing

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let nobody else add or remove blocks; what a process that was killed has left behind is removed.

        Raises:
            OSError: the folder may not be written.
        """
        with self._alone():
            self._refresh()
            yield

    def tell(self, error: OSError) -> None:
        """Say in one line that nothing can be added, and not again before something was."""
        reason = error.strerror or str(error)
        if reason != self._failure:
            log.warning("prompt cache %s: no prompts are added: %s", self.path, reason)
        self._failure = reason

    def add(self, header: BlockHeader, parts: Sequence[memoryview], protected: set[str]) -> StoredBlock | None:
        """Write a block; the least recently used leave for it.

        Called within ``writing``.

        Args:
            header: what it is.
            parts: residuals and entries.
            protected: names of blocks that may not leave, those in front of it.

        Returns:
            The block, or None where the limit leaves no room for it.

        Raises:
            OSError: the disk is full, or may not be written.
        """
        name = name_of(header.above, header.key)
        num_bytes = len(encoded(header)) + header.num_bytes
        if not self._make_room(num_bytes, protected):
            return None
        with replacing(self._path(name)) as partial:
            write_block(partial, header, parts)
        self._failure = None
        block = StoredBlock(name, header)
        with self._lock:
            self._files[name] = _File(num_bytes, 0)
            self._enter(block)
        self._touch(name)
        return block

    def remove_part(self, of: StoredBlock) -> None:
        """Remove shorter blocks whose tokens a longer one begins with, and that nothing follows."""
        with self._lock:
            shorter = [
                other.name
                for other in self.beside(of.header.above)
                if other.name != of.name
                and of.header.key.startswith(other.header.key)
                and not self._below.get(other.name)
                and all(own <= part for own, part in zip(of.header.starts, other.header.starts, strict=True))
            ]
        for name in shorter:
            self._remove(name)

    def _make_room(self, num_bytes: int, protected: set[str]) -> bool:
        if num_bytes > self.max_bytes:
            return False
        with self._lock:
            excess = self.num_bytes + num_bytes - self.max_bytes
            oldest = sorted((name for name in self._files if name not in protected), key=lambda n: self._files[n][1])
            leaving = []
            for name in oldest:
                if excess <= 0:
                    break
                excess -= self._files[name].num_bytes
                leaving.append(name)
        if excess > 0:
            return False
        for name in leaving:
            self._remove(name)
        return True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of the folder, and remove what is there under temporary names: nobody writes it then. Without
        locks somebody may, and one process at a time has to.
        """
        handle = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            lock(handle, wait=True)
            for entry in os.scandir(self.path) if HAS_LOCKS else ():
                if _PARTIAL.fullmatch(entry.name):
                    Path(entry.path).unlink(missing_ok=True)
            yield
        finally:
            os.close(handle)

    # What is there

    def _refresh(self, *, tells: bool = False) -> None:
        """Look at the folder again: others may have added and removed blocks.

        Args:
            tells: whether what is left out is said, as when a folder is opened.
        """
        there: dict[str, _File] = {}
        for entry in os.scandir(self.path):
            if _BLOCK.fullmatch(entry.name):
                try:
                    seen = entry.stat()
                except FileNotFoundError:
                    continue
                there[entry.name.removesuffix(SUFFIX)] = _File(seen.st_size, seen.st_mtime_ns)
        with self._lock:
            self._files = there
            self._unread.clear()
            for name in [name for name in self._blocks if name not in there]:
                self._forget(name)
            unread = [name for name in there if name not in self._blocks and name not in self._left_out]
            reasons = [reason for name in unread if (reason := self._enter_file(name)) is not None]
        if tells and reasons:
            count = "1 block is" if len(reasons) == 1 else f"{len(reasons)} blocks are"
            log.warning("prompt cache %s: %s not used: %s", self.path, count, _most_common(reasons))

    def _look_at(self, name: str) -> StoredBlock | None:
        """Read the header of a file that was not there when the folder was looked at."""
        path = self._path(name)
        if not path.exists():
            return None
        self._enter_file(name)
        return self._blocks.get(name)

    def _enter_file(self, name: str) -> str | None:
        """Take up a file; return why it cannot be used, or None."""
        try:
            header = read_header(self._path(name))
        except FileNotFoundError:
            return None
        except CorruptError as error:
            self._remove(name)
            return f"damaged: {error}"
        except OSError as error:
            self._unread.add(name)
            return str(error)
        except (MismatchError, ValueError, TypeError) as error:
            self._left_out.add(name)
            return str(error)
        if header.model != self.model:
            self._left_out.add(name)
            other = next(key for key in (*self.model, *header.model) if header.model.get(key) != self.model.get(key))
            if other in DIGESTS:
                return "of another model"
            return f"of another {other}: {header.model.get(other)} there, {self.model.get(other)} here"
        if name != name_of(header.above, header.key):
            self._remove(name)
            return "damaged: it has another name than its content"
        self._enter(StoredBlock(name, header))
        return None

    def _enter(self, block: StoredBlock) -> None:
        self._blocks[block.name] = block
        self._below.setdefault(block.header.above, set()).add(block.name)

    def _forget(self, name: str) -> None:
        self._files.pop(name, None)
        block = self._blocks.pop(name, None)
        if block is not None:
            beside = self._below[block.header.above]
            beside.discard(name)
            if not beside:
                del self._below[block.header.above]

    def _remove(self, name: str) -> None:
        """Remove a file, or leave it out where nothing may be written, or not this one."""
        try:
            if self.is_read_only:
                self._left_out.add(name)
            else:
                self._path(name).unlink(missing_ok=True)
        except OSError:
            self._left_out.add(name)
        with self._lock:
            self._forget(name)

    def _touch(self, name: str) -> None:
        self._clock = max(self._clock + 1, time.time_ns())
        try:
            os.utime(self._path(name), ns=(self._clock, self._clock))
        except OSError:  # gone, or another user's: it leaves a little earlier
            return
        with self._lock:
            if name in self._files:
                self._files[name] = self._files[name]._replace(used_at=self._clock)

    def _path(self, name: str) -> Path:
        return self.path / (name + SUFFIX)


def _most_common(reasons: Sequence[str]) -> str:
    """Return the reason that is there most often, and that there are others."""
    first = max(reasons, key=reasons.count)
    others = len(reasons) - reasons.count(first)
    return f"{first} ({others} for other reasons)" if others else first


def checked_limit(max_bytes: int, least: int) -> int:
    """Return a limit that has room for one block at least.

    Raises:
        ConfigError: it has not; both numbers are named.
    """
    if max_bytes < least:
        raise ConfigError(
            f"prompt_cache_bytes is {format_bytes(max_bytes)}, and one block takes {format_bytes(least)}; give more"
        )
    return max_bytes
