"""Memory that was freed is given back to the system while a server runs.

The C library keeps what threads have freed for their next calls, in a pool for each thread. A body of a megabyte takes
tens of megabytes for a moment, so a server whose threads have each read one holds the most that each ever needed. With
what is free given back every few seconds, a server holds what it uses.
"""

from __future__ import annotations

import asyncio

from vivace.kernels.heap import trimmer

PERIOD_S = 5.0


async def trim() -> None:
    """Give back what is free every few seconds, until cancelled."""
    call = trimmer()
    while call is not None:
        await asyncio.sleep(PERIOD_S)
        await asyncio.to_thread(call, 0)
