"""Writing files that are either complete or not there (under a temporary name first, then renamed), and where the
package keeps files of its own.
"""

from __future__ import annotations

import errno
import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # pragma: no cover - another system: files have no locks there
    fcntl = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None
"""Whether files can be locked here."""
UNREADABLE = (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error)
"""What reading a text file raises, packed by gzip or not, that is damaged or no text."""


def unpacked(path: Path) -> bytes:
    """Return the content of a file, unpacked where its name ends in ``.gz``.

    Raises:
        OSError: it cannot be read; one of ``UNREADABLE`` where it is damaged.
    """
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary name to write to; it becomes ``path`` if the block ends without an error, and is deleted
    otherwise.

    The temporary file lies beside the target, so that renaming is atomic; a previous file at ``path`` is kept until
    then.
    Missing parent folders are created.

    Args:
        path: name of the finished file.

    Yields:
        Path: ``.<name>.<process>.partial`` in the same folder.

    Raises:
        OSError: the folder cannot be created, or the disk is full; the error names ``path``.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(target)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(partial)):
            raise
        raise OSError(error.errno, error.strerror, str(target)) from error
    finally:
        partial.unlink(missing_ok=True)


def check_writable(path: str | Path) -> None:
    """Refuse a name under which no file can be written, before the work is done that the file is for.

    Raises:
        OSError: it is a folder, or its folder cannot be made or written to; the error names ``path``.
    """
    if Path(path).is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with suppress(_Unused), replacing(path) as partial:
        partial.touch()
        raise _Unused


class _Unused(Exception):
    """Ends a trial of ``replacing``, which then leaves the target as it was."""


def write_text(path: str | Path, text: str) -> None:
    """Write a whole text file, or leave the previous one as it was.

    Raises:
        OSError: see `replacing`.
    """
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def whole_lines(path: str | Path) -> str:
    """Return the text of a file up to its last end of a line.

    What follows was written by a process that was killed, or that is still writing, and may end within a character.

    Raises:
        OSError: the file cannot be read.
        UnicodeDecodeError: it is not text.
    """
    data = Path(path).read_bytes()
    return data[: data.rfind(b"\n") + 1].decode("utf-8")


def lock(handle: int, *, wait: bool) -> bool:
    """Take the lock of an open file, which is let go when the file is closed.

    Args:
        handle: descriptor of the file.
        wait: whether to wait for another process that holds it.

    Returns:
        Whether it was taken; True also on systems without such locks.
    """
    if not HAS_LOCKS:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def cache_folder() -> Path:
    """Return the folder for files that can be made again: ``VIVACE_CACHE_DIR``, or ``vivace`` in the user's cache."""
    own = os.environ.get("VIVACE_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "vivace"
