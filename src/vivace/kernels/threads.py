"""Limits PyTorch to one thread while native kernels decode, so that only one set of threads is busy.

After every operation that PyTorch divides among threads, those threads spin for a while on the cores that the native
kernels need next; and the operations that PyTorch computes between native calls are too small to gain from threads. The
limit is OpenMP's, which is kept separately for each Python thread, so other threads are not affected.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import local
from typing import Protocol, cast

import torch


class _Setting(Protocol):
    def __call__(self, count: int, /) -> object: ...


class _Aside(local):
    count: int | None = None
    """Number of threads that native kernels use while PyTorch is limited to one; None while it is not."""


_aside = _Aside()


def num_threads() -> int:
    """Return the number of threads for a native call from this Python thread."""
    return torch.get_num_threads() if _aside.count is None else _aside.count


@contextmanager
def one_pytorch_thread() -> Iterator[None]:
    """Run PyTorch's operations on the calling thread within this context; native kernels use as many as before."""
    limit, count = _omp(), torch.get_num_threads()
    if limit is None or count == 1:
        yield
        return
    _aside.count = count
    limit(1)
    try:
        yield
    finally:
        limit(count)
        _aside.count = None


@cache
def _omp() -> _Setting | None:
    """Return OpenMP's function that sets the number of threads, or None where the process has no OpenMP."""
    try:
        return cast("_Setting", ctypes.CDLL(None).omp_set_num_threads)
    except (AttributeError, OSError, TypeError):
        return None
