"""Zeroed memory that takes room page by page, as it is written, and gives it back.

The system hands out addresses at once and memory when a page is first written, so that a cache can have room for every
text a server may be asked for, and takes what its texts really hold. Giving back needs Linux; elsewhere memory that was
written once stays taken.
"""

from __future__ import annotations

import mmap
import sys
from math import lcm, prod

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0
"""Addresses alone; Python knows the name from 3.13 on."""


def whole_pages(num_bytes: int) -> int:
    """Bytes of the pages that so many bytes from the beginning of a page lie in."""
    return -(-num_bytes // PAGE) * PAGE


def items_to_a_page(item_bytes: int) -> int:
    """The least number of neighbouring items that fill whole pages."""
    return lcm(PAGE, item_bytes) // item_bytes


class Pages:
    """A stretch of zeroed memory of this process."""

    def __init__(self, num_bytes: int) -> None:
        """Take addresses.

        Raises:
            MemoryError: the system has none to give.
        """
        size = max(whole_pages(num_bytes), PAGE)
        try:
            if hasattr(mmap, "MAP_PRIVATE"):
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
                self._map = mmap.mmap(-1, size, flags=flags)
            else:
                self._map = mmap.mmap(-1, size)
        except (OSError, OverflowError, ValueError) as exc:
            raise MemoryError(str(exc)) from exc
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would take 2 MiB for the first entry of each head
            self._advise(mmap.MADV_NOHUGEPAGE, 0, size)

    def tensor(self, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over a part of it, from byte ``first`` on; it keeps the memory alive."""
        count = prod(shape)
        if not count:
            return torch.zeros(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=first).view(shape)

    def clear(self, first: int, num_bytes: int) -> None:
        """Zero all pages that these bytes lie in, and give them back; ``first`` begins a page."""
        assert first % PAGE == 0, first
        size = whole_pages(num_bytes)
        if not size:
            return
        if sys.platform == "linux":
            self._map.madvise(mmap.MADV_DONTNEED, first, size)
        else:  # what DONTNEED leaves behind differs there
            self._map[first : first + size] = bytes(size)

    def _advise(self, advice: int, first: int, size: int) -> None:
        try:
            self._map.madvise(advice, first, size)
        except OSError:  # a kernel without huge pages does not know the word
            return
