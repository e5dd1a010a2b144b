"""Threads for the work that a request needs before and after the model, beside the event loop.

The loop's own thread only passes data on. Work that takes time in Python itself runs in threads, between which Python
switches often. A single call into a library that does not release Python's lock may take some tens of milliseconds;
what could take longer runs in a process (``grammar_trial.py``, ``long_text.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from vivace.serve.api_error import APIError

P = ParamSpec("P")
T = TypeVar("T")


class Lane:
    """A few threads for one kind of work, with a bounded queue."""

    def __init__(self, name: str, *, num_threads: int, max_open: int) -> None:
        """Start nothing yet.

        Args:
            name: of the threads.
            num_threads: pieces of work done at once.
            max_open: pieces of work under way or waiting at most.
        """
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"vivace-{name}")
        self._max_open = max_open
        self._num_open = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a call that runs in one of the threads.

        Raises:
            APIError: the queue is full (429).
        """
        if self._num_open >= self._max_open:
            raise APIError(429, f"{self._num_open} requests wait to be read; try again later", code="queue_full")
        self._num_open += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))
        finally:
            self._num_open -= 1

    async def finish(self, function: Callable[[], T]) -> T:
        """Return the result of what is left to do for a request that was taken, however many others wait."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def close(self) -> None:
        """Take no more work; what has begun is completed."""
        self._threads.shutdown(wait=False, cancel_futures=True)
