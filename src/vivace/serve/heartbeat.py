"""Shows whether the worker's thread makes progress: it notes when it begins a step and when it is idle."""

from __future__ import annotations

import time


class Heartbeat:
    """The start of the current step. One thread writes it and others read it; replacing one reference needs no lock."""

    def __init__(self) -> None:
        self._busy_since: float | None = None

    def beat(self) -> None:
        """Note that a new step begins now."""
        self._busy_since = time.monotonic()

    def rest(self) -> None:
        """Note that the thread is idle."""
        self._busy_since = None

    @property
    def busy_s(self) -> float:
        """Return the seconds that the thread has spent in its current step; 0 while it is idle."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since
