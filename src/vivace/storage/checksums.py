"""A checksum for every page of a store, compared by whoever reads the page.

Whatever is read while a model runs (a bundle, an expert, a record of a neuron) is whole pages, so one table serves
every kind of unit and every reader. The threads that read compare each chunk while it is still in the processor's
cache: natively where the kernels are built, else with ``zlib``. The checksum is CRC-32: every burst of up to 32 wrong
bits in a page is found, and of other damage all but one in 2^32.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from pathlib import Path

from vivace.errors import CorruptError
from vivace.kernels.library import found_library
from vivace.storage.readers import PAGE, Kind, Reader, address
from vivace.storage.store import Bundle, Store, table_is_damaged


class PageSums:
    """CRC-32 of the pages of a store's bundles, from the beginning of its file on."""

    def __init__(self, store: Store, sums: bytearray) -> None:
        """Take a table of four bytes a page, the lowest first."""
        self.path = store.path
        self.sums = memoryview(sums)
        self._bundles = sorted(store.bundles.values(), key=lambda bundle: bundle.offset)
        self._starts = [bundle.offset for bundle in self._bundles]
        self._library = found_library()

    @property
    def address(self) -> int:
        """Where the table lies; it stays there."""
        return address(self.sums)

    @property
    def count(self) -> int:
        """Pages that have a checksum."""
        return len(self.sums) // 4

    def compare(self, offset: int, memory: memoryview) -> None:
        """Compare pages that were read into ``memory`` from ``offset`` on.

        Raises:
            CorruptError: one is not as it was written; names the unit it belongs to.
        """
        assert offset % PAGE == len(memory) % PAGE == 0, "units are whole pages"
        found = self._first_damaged(offset, memory)
        if found is not None:
            raise self.damaged(found)

    def _first_damaged(self, offset: int, memory: memoryview) -> int | None:
        """Where the first page begins that differs."""
        if self._library is not None:
            found = self._library.vivace_damaged(self.address, self.count, address(memory), offset, len(memory))
            return None if found < 0 else int(found)
        expected = self.sums.cast("I")
        for first in range(0, len(memory), PAGE):
            if zlib.crc32(memory[first : first + PAGE]) != expected[(offset + first) // PAGE]:
                return offset + first
        return None

    def damaged(self, offset: int) -> CorruptError:
        """The error of a damaged unit, by where one of its pages begins in the file."""
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
    """A reader whose pages are compared with their checksums; all that it is asked for is whole pages."""

    def __init__(self, reader: Reader, pages: PageSums) -> None:
        """Compare what ``reader`` gives with ``pages``."""
        self.inner = reader
        self.pages = pages
        self.name: Kind = reader.name
        self.path: Path = reader.path

    @property
    def file(self) -> int | None:
        """Descriptor that plain reads may go to; who reads there compares as well."""
        return self.inner.file

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` on; raises as ``Reader``, and ``CorruptError`` where a page was changed."""
        self.inner.read(offset, into)
        self.pages.compare(offset, into)

    def close(self) -> None:
        """Let go of the file."""
        self.inner.close()


def checked(reader: Reader, store: Store) -> Reader:
    """A reader of a store's file that compares checksums, where the store has them.

    Raises:
        CorruptError: the table of checksums itself is damaged.
    """
    pages = None if isinstance(reader, CheckedReader) else load_page_sums(store)
    return reader if pages is None else CheckedReader(reader, pages)


def load_page_sums(store: Store) -> PageSums | None:
    """The table of a store; None for one that was written before there were any.

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
    """What the threads that read for ``reader`` compare with."""
    return reader.pages if isinstance(reader, CheckedReader) else None
