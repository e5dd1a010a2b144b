"""The C library's heap: memory that was freed is given back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def trimmer() -> Callable[[int], object] | None:
    """Return glibc's ``malloc_trim``, which releases Python's lock; None where the C library has no such function."""
    try:
        found: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return found
