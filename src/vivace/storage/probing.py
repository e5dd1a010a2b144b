"""Which reader is the fastest on a file, found by reading it; and what the kernel says came from the device."""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from vivace.errors import ConfigError, UnsupportedError, nearest
from vivace.storage.pools import open_pool, whole
from vivace.storage.readers import NUM_THREADS, PAGE, READERS, Kind, Reader, aligned

PROBE_BYTES = 32 << 20
"""What is read to compare readers."""


@dataclass(frozen=True)
class Choice:
    """A reader and why it was taken."""

    reader: Reader
    why: str
    gb_per_s: float | None = None
    """Of the probe, 10^9 bytes a second; None when nothing was measured."""


def open_reader(path: Path, kind: str = "auto") -> Choice:
    """The reader asked for; "auto" takes the fastest from a cold cache, measured on this file.

    Raises:
        ConfigError: there is no such reader.
        UnsupportedError: it does not work here, and was asked for by name.
    """
    if kind != "auto":
        if kind not in READERS:
            raise ConfigError(f"there is no reader {kind!r}{nearest(kind, ('auto', *READERS))}")
        return Choice(READERS[kind](path), "asked for")
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
    told = ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items())
    why = "; ".join([f"fastest of {told} GB/s from a cold cache", *missing])
    return Choice(opened[best], why, speeds[best])


def probe(reader: Reader, path: Path, num_bytes: int = PROBE_BYTES, num_threads: int = NUM_THREADS) -> float:
    """GB/s (10^9 bytes) of a reader on the middle of its file, the page cache told to forget it before."""
    size = path.stat().st_size
    num_bytes = min(num_bytes, size - size % PAGE)
    first = (size - num_bytes) // 2 // PAGE * PAGE
    drop_cached(path, first, num_bytes)
    memory = aligned(num_bytes)
    with closing(open_pool(reader, num_threads=num_threads)) as pool:
        begun = time.perf_counter()
        pool.submit(*whole(first, memory)).wait()
        return num_bytes / (time.perf_counter() - begun) / 1e9


def drop_cached(path: Path, first: int = 0, num_bytes: int = 0) -> bool:
    """Ask the kernel to forget a part of a file (0 bytes: to its end); False where it cannot be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, first, num_bytes, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
    return True


def device_bytes() -> int | None:
    """Bytes this process has made the device read, as the kernel counts them; None where it does not say."""
    try:
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    except OSError:
        return None
    return None
