"""Zeroed memory that is allocated page by page as it is written, and can be freed again.

The operating system reserves addresses at once and allocates memory when a page is first written. A cache can therefore
have addresses for the longest texts that a server accepts, and uses the memory that its texts need. Freeing pages needs
Linux; on other systems memory that was written once stays allocated.
"""

from __future__ import annotations

import mmap
import sys
from math import lcm, prod

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0
"""Flag that reserves addresses without swap space; Python defines its name from 3.13 on."""


def whole_pages(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def items_to_a_page(item_bytes: int) -> int:
    """Return the least number of neighbouring items of ``item_bytes`` each that fill whole pages."""
    return lcm(PAGE, item_bytes) // item_bytes


class Pages:
    """A range of zeroed memory of this process."""

    def __init__(self, num_bytes: int) -> None:
        """Reserve addresses.

        Raises:
            MemoryError: the operating system refuses.
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
        """Return a tensor that shares the memory from byte ``first`` on and keeps it alive."""
        count = prod(shape)
        if not count:
            return torch.zeros(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=first).view(shape)

    def clear(self, first: int, num_bytes: int) -> None:
        """Zero and free all pages of ``num_bytes`` bytes from byte ``first`` on, which must begin a page."""
        assert first % PAGE == 0, first
        size = whole_pages(num_bytes)
        if not size:
            return
        if sys.platform == "linux":
            self._map.madvise(mmap.MADV_DONTNEED, first, size)
        else:  # elsewhere DONTNEED does not promise zeros
            self._map[first : first + size] = bytes(size)

    def _advise(self, advice: int, first: int, size: int) -> None:
        try:
            self._map.madvise(advice, first, size)
        except OSError:  # a kernel without huge pages refuses the advice
            return
