"""Memory beside tensors: what the C library's heap and PyTorch's products of matrices keep is given back."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

LARGE_BLOCK = 4 * 2**20
"""Bytes from which blocks of memory go back to the system when they are freed (``keep_little``)."""
PRIMITIVES = 64
"""Number of products of matrices, by their shapes, for which PyTorch keeps code and memory to work in."""
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_M_MMAP_THRESHOLD = -3  # of mallopt, see malloc.h


def trimmer() -> Callable[[int], object] | None:
    """Return glibc's ``malloc_trim``, which releases Python's lock; None where the C library has no such function."""
    try:
        found: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return found


def keep_little() -> None:
    """Let a process that works on many shapes keep little memory beside its tensors; call it before the first product.

    Large blocks go back to the system as soon as they are freed, where the C library is glibc. Otherwise glibc learns
    from freed blocks of up to 32 MiB to keep such blocks in its heap, which the changing shapes of batches then fill
    with holes. And oneDNN, which computes PyTorch's products on a CPU, keeps something for each of the last 1,024
    shapes, close to a GB in a training, whose batches have hundreds of them. It is told to keep less, unless the
    environment has its own number.
    """
    for name in _CACHES:
        os.environ.setdefault(name, str(PRIMITIVES))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)
