"""Memory that was freed, given back to the system.

The C library keeps what threads have freed for their next calls, in a pool for each thread. A body of a megabyte takes
tens of megabytes for a moment, so a server whose threads have each read one holds the most that each ever needed. Every
few seconds what is free is given back, and a server takes what it uses.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

PERIOD_S = 5.0


def trimmer() -> Callable[[int], object] | None:
    """Glibc's ``malloc_trim``, which lets go of Python's lock; None where the C library has none."""
    try:
        found: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return found


async def trim() -> None:
    """Give back what is free, until cancelled."""
    call = trimmer()
    while call is not None:
        await asyncio.sleep(PERIOD_S)
        await asyncio.to_thread(call, 0)
