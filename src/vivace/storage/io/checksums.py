"""Checksums of the pages of a store, compared by the thread that reads a page.

Everything that is read while a model runs (a bundle, an expert, the record of a neuron) is whole pages, so one table
serves every kind of unit and every reader. A chunk is compared while it is still in the processor's cache: natively
where the kernels are built, else with ``zlib``. The checksum is CRC-32, which detects every burst of up to 32 wrong
bits in a page and misses one in 2^32 of other damages.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from pathlib import Path

from vivace.errors import CorruptError
from vivace.kernels.library import found_library
from vivace.storage.io.readers import PAGE, Kind, Reader, address
from vivace.storage.store import Bundle, Store, table_is_damaged


class PageSums:
    """The CRC-32 of every page of a store's bundles, from the beginning of its file on."""

    def __init__(self, store: Store, sums: bytearray) -> None:
        """Wrap the table ``sums``, which holds one little-endian uint32 a page."""
        self.path = store.path
        self.sums = memoryview(sums)
        self._bundles = sorted(store.bundles.values(), key=lambda bundle: bundle.offset)
        self._starts = [bundle.offset for bundle in self._bundles]
        self._library = found_library()

    @property
    def address(self) -> int:
        """Address of the table, which never moves."""
        return address(self.sums)

    @property
    def count(self) -> int:
        """Number of pages that have a checksum."""
        return len(self.sums) // 4

    def compare(self, offset: int, memory: memoryview) -> None:
        """Compare the pages in ``memory``, which were read from ``offset`` on, with their checksums.

        Raises:
            CorruptError: a page differs; the message names the unit that it belongs to.
        """
        assert offset % PAGE == len(memory) % PAGE == 0, "units are whole pages"
        found = self._first_damaged(offset, memory)
        if found is not None:
            raise self.damaged(found)

    def _first_damaged(self, offset: int, memory: memoryview) -> int | None:
        """Return the offset in the file of the first page that differs."""
        if self._library is not None:
            found = self._library.vivace_damaged(self.address, self.count, address(memory), offset, len(memory))
            return None if found < 0 else int(found)
        expected = self.sums.cast("I")
        for first in range(0, len(memory), PAGE):
            if zlib.crc32(memory[first : first + PAGE]) != expected[(offset + first) // PAGE]:
                return offset + first
        return None

    def damaged(self, offset: int) -> CorruptError:
        """Return the error that names the unit whose page at ``offset`` is damaged."""
        return CorruptError(
            f"{self.path}: {self._unit(offset)} is damaged, its checksum is not the one that was written; "
            "restore the file or convert the model again"
        )

    def _unit(self, offset: int) -> str:
        bundle: Bundle = self._bundles[max(0, bisect_right(self._starts, offset) - 1)]
        if bundle.count == 1:
            return f"bundle {bundle.name}"
        return f"neuron {(offset - bundle.offset) // bundle.stride} of bundle {bundle.name}"


class CheckedReader:
    """A reader that compares what it reads with checksums; it can read whole pages only."""

    def __init__(self, reader: Reader, pages: PageSums) -> None:
        """Wrap ``reader``."""
        self.inner = reader
        self.pages = pages
        self.name: Kind = reader.name
        self.path: Path = reader.path

    @property
    def file(self) -> int | None:
        """The descriptor of the reader inside; whoever reads from it has to compare as well."""
        return self.inner.file

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` on; raises as ``Reader``, and ``CorruptError`` where a page differs."""
        self.inner.read(offset, into)
        self.pages.compare(offset, into)

    def close(self) -> None:
        """Close the file."""
        self.inner.close()


def checked(reader: Reader, store: Store) -> Reader:
    """Wrap a reader of a store's file so that it compares checksums, if the store has them.

    Raises:
        CorruptError: the table of checksums itself is damaged.
    """
    pages = None if isinstance(reader, CheckedReader) else load_page_sums(store)
    return reader if pages is None else CheckedReader(reader, pages)


def load_page_sums(store: Store) -> PageSums | None:
    """Read the table of a store; None for a store that was written before there were checksums of pages.

    Raises:
        CorruptError: the table itself is damaged.
    """
    table = store.page_sums
    if table is None:
        return None
    with store.path.open("rb") as file:
        file.seek(table.offset)
        sums = bytearray(file.read(table.num_bytes))
    if len(sums) != table.num_bytes or zlib.crc32(sums) != table.checksum:
        raise table_is_damaged(store)
    return PageSums(store, sums)


def page_sums_of(reader: Reader) -> PageSums | None:
    """Return the checksums that a thread reading for ``reader`` must compare with, if any."""
    return reader.pages if isinstance(reader, CheckedReader) else None
