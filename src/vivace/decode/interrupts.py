"""Ctrl-C waits until a step is over: it would leave weights half read, or entries that no sequence knows of."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Handler = Callable[[int, FrameType | None], object]


class DeferredInterrupts(AbstractContextManager[None]):
    """Hands the first SIGINT that comes meanwhile to its handler at the end; a second one is handed on at once, since a
    disk may never answer.

    Only the main thread receives signals; in any other, and where the program ignores them, nothing changes.
    """

    def __init__(self) -> None:
        self._handler: Handler | None = None
        self._has_come = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            found = signal.getsignal(signal.SIGINT)
            if callable(found):
                self._handler = found
                signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        assert self._handler is not None
        if self._has_come:
            self._has_come = False
            self._handler(number, frame)
        self._has_come = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._has_come:
                self._handler(signal.SIGINT, None)


def defer_interrupts(function: Callable[P, T]) -> Callable[P, T]:
    """Let interrupts wait until a call of ``function`` is over."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with DeferredInterrupts():
            return function(*args, **kwargs)

    return called
