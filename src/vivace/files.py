"""Files that are either complete or not there: written under a temporary name, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Name to write to; becomes ``path`` when the block ends well, and nothing when it does not.

    The temporary file lies beside the target, so the rename is atomic; what was at ``path`` stays until then.
    Missing parent folders are made.

    Args:
        path: Where the finished file shall be.

    Yields:
        Path: ``.<name>.<process>.partial`` in the same folder.

    Raises:
        OSError: the folder cannot be made, or the disk is full; it names ``path``, and the temporary file is gone.
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


def write_text(path: str | Path, text: str) -> None:
    """Write a whole text file, or leave what was there.

    Raises:
        OSError: see `replacing`.
    """
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
