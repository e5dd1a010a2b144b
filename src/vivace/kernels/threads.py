"""One set of threads at a time: PyTorch's are put aside where native kernels do the work.

After every operation that PyTorch splits, its threads spin for a while on the cores that the native pool needs next,
and what is left to PyTorch between native calls is too small to be worth splitting. The number it may use is OpenMP's,
kept for each thread of Python, so others are not touched.
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
    """Threads that native kernels still use while PyTorch has one."""


_aside = _Aside()


def num_threads() -> int:
    """Threads for native kernels, called from here."""
    return torch.get_num_threads() if _aside.count is None else _aside.count


@contextmanager
def one_pytorch_thread() -> Iterator[None]:
    """PyTorch's operations run on the calling thread; native kernels use as many as before."""
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
    """OpenMP's own setting, where the process has one."""
    try:
        return cast("_Setting", ctypes.CDLL(None).omp_set_num_threads)
    except (AttributeError, OSError, TypeError):
        return None
