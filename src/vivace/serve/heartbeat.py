"""Whether the worker's thread moves: it says when it begins something and when it rests."""

from __future__ import annotations

import time


class Heartbeat:
    """Written by one thread, read by others; a single reference is replaced, so no lock is needed."""

    def __init__(self) -> None:
        self._busy_since: float | None = None

    def beat(self) -> None:
        """Note that a new step begins now."""
        self._busy_since = time.monotonic()

    def rest(self) -> None:
        """Note that there is nothing to do."""
        self._busy_since = None

    @property
    def busy_s(self) -> float:
        """Seconds that the thread has spent in its current step; 0 while it rests."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since
