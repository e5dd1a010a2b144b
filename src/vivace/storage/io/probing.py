"""Measure which blocking reader is the fastest on a file, and count the bytes that the device delivered."""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from vivace.errors import ConfigError, UnsupportedError, nearest
from vivace.storage.io.native_reader import open_async_reader
from vivace.storage.io.readers import NUM_THREADS, PAGE, READERS, Kind, Reader, aligned

PROBE_BYTES = 32 << 20
"""Bytes that are read to compare readers."""


@dataclass(frozen=True)
class ReaderChoice:
    """A reader, and the reason for which it was chosen."""

    reader: Reader
    why: str
    gb_per_s: float | None = None
    """Speed in the probe, 10^9 bytes a second; None when nothing was measured."""


def open_reader(path: Path, kind: str = "auto") -> ReaderChoice:
    """Open the reader of that kind; "auto" measures all of them on this file, uncached, and takes the fastest.

    Raises:
        ConfigError: there is no such reader.
        UnsupportedError: it does not work here, and was asked for by name.
    """
    if kind != "auto":
        if kind not in READERS:
            raise ConfigError(f"there is no reader {kind!r}{nearest(kind, ('auto', *READERS))}")
        return ReaderChoice(READERS[kind](path), "asked for")
    speeds: dict[str, float] = {}
    missing: list[str] = []
    opened: dict[str, Reader] = {}
    for name in get_args(Kind):
        try:
            opened[name] = READERS[name](path)
        except UnsupportedError as exc:
            missing.append(str(exc))
            continue
        speeds[name] = probe(opened[name], path)
    best = max(speeds, key=speeds.__getitem__)
    for name, reader in opened.items():
        if name != best:
            reader.close()
    figures = ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items())
    why = "; ".join([f"fastest of {figures} GB/s from a cold cache", *missing])
    return ReaderChoice(opened[best], why, speeds[best])


def probe(reader: Reader, path: Path, num_bytes: int = PROBE_BYTES, num_threads: int = NUM_THREADS) -> float:
    """Measure a reader on the middle of its file, after dropping that from the page cache; in 10^9 bytes a second."""
    size = path.stat().st_size
    num_bytes = min(num_bytes, size - size % PAGE)
    first = (size - num_bytes) // 2 // PAGE * PAGE
    drop_cached(path, first, num_bytes)
    memory = aligned(num_bytes)
    with closing(open_async_reader(reader, num_threads=num_threads)) as opened:
        begun = time.perf_counter()
        opened.submit_whole(memory, first).wait()
        return num_bytes / (time.perf_counter() - begun) / 1e9


def drop_cached(path: Path, first: int = 0, num_bytes: int = 0) -> bool:
    """Ask the kernel to drop a part of a file (0 bytes: to its end) from its cache; False where it cannot be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, first, num_bytes, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
    return True


def device_bytes() -> int | None:
    """Return the bytes that the device has read for this process, as the kernel counts them; None where it does not."""
    try:
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    except OSError:
        return None
    return None
