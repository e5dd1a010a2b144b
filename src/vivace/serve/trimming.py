"""Returns freed memory to the system while a server runs.

The C library keeps what threads have freed for their next calls, in a pool for each thread. Reading a body of a
megabyte takes tens of megabytes for a moment, so a server whose threads have each read one holds the most that each
ever needed. When free memory is returned every few seconds, a server holds what it uses.
"""

from __future__ import annotations

import asyncio

from vivace.kernels.heap import trimmer

PERIOD_S = 5.0


async def trim() -> None:
    """Return free memory every few seconds, until cancelled."""
    call = trimmer()
    while call is not None:
        await asyncio.sleep(PERIOD_S)
        await asyncio.to_thread(call, 0)
