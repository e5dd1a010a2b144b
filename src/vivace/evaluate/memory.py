"""Memory use: the peak of the process, and the part of it that a decoding method needs.

*Peak memory* is the resident memory of the whole process, or what was allocated on an accelerator. On Linux the
kernel's high-water mark is reset before the work (``/proc/self/clear_refs``); weights that are mapped from a file count
once they have been read. Other systems have no mark to reset, and nothing is reported.

In a benchmark all methods share one process, so its peak cannot be attributed to any of them.
*Holdings* are counted instead: the bytes of every tensor that a session refers to, as weights of the model, as
key/value cache, and as drafter (draft weights, quantized copies of the model's layers, a draft model and its cache).
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from vivace.core.seams import Drafter
from vivace.decode.session import Session

_RESET_HIGH_WATER = "5"
_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass
class PeakMemory:
    """The result of `peak_memory`."""

    num_bytes: int | None = None
    """Peak in bytes, set when the work is done; None if it is unknown."""


@contextmanager
def peak_memory(device: torch.device) -> Iterator[PeakMemory]:
    """Measure the peak memory during a block.

    Args:
        device: device of the model; for a CPU the memory of the whole process is measured.

    Yields:
        PeakMemory: its ``num_bytes`` is set when the block ends, None if it is unknown.
    """
    peak = PeakMemory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.num_bytes = torch.cuda.max_memory_allocated(device)
        return
    can_reset = _reset_high_water()
    yield peak
    if can_reset:
        peak.num_bytes = _read_status("VmHWM")


def resident_memory() -> int | None:
    """Return the bytes of this process that are in memory now; None if the system does not report it."""
    return _read_status("VmRSS") if _STATUS.is_file() else None


@dataclass(frozen=True)
class Holdings:
    """Bytes of the tensors needed for answering; the memory of libraries and Python is not included."""

    weights: int
    """Weights of the model as they are in memory, packed or quantized."""
    cache: int
    """Keys and values of every slot, up to the longest answer."""
    drafter: int
    """Everything else that the session refers to: what the method needs and plain decoding does not."""


def holdings_of(session: Session, drafter: Drafter) -> Holdings:
    """Count the memory that an answer needs; parts of the model that a drafter refers to count as the model's.

    Args:
        session: a session after its first steps, when the drafter has made the copies that it works with.
        drafter: the drafter of its requests.
    """
    weights, cache, besides = held_bytes(session.model, session.cache, (session, drafter))
    return Holdings(weights, cache, besides)


def held_bytes(*owners: object) -> tuple[int, ...]:
    """Return the bytes of all tensors and arrays that each owner refers to and no owner before it does.

    Objects of this project, modules of PyTorch and containers are searched recursively. Memory that several tensors
    share counts once, and completely: a view of one row holds all of its tensor. The values of a dictionary with weak
    keys count for the owner that refers to the key, so copies of layers that were made for a drafter count as the
    drafter's.

    Args:
        owners: objects, in the order in which shared memory is to be counted.
    """
    tally = _Tally()
    return tuple(tally.add(owner) for owner in owners)


class _Tally:
    """The objects and addresses that have been counted so far."""

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}
        """Objects by id; they are kept alive, since an id is used again once its object is gone."""
        self._addresses: set[int] = set()
        """Addresses of memory that has been counted."""
        self._weak: list[Mapping[Any, Any]] = []
        """Dictionaries with weak keys that have been found."""

    def add(self, owner: object) -> int:
        """Return the bytes that an owner refers to and that have not been counted before."""
        total, waiting = 0, [owner]
        while waiting:
            thing = waiting.pop()
            if id(thing) not in self._seen:
                self._seen[id(thing)] = thing
                if isinstance(thing, WeakKeyDictionary | WeakIdKeyDictionary):
                    self._weak.append(thing)
                else:
                    total += self._size(thing)
                    waiting += _parts(thing)
            if not waiting:
                owned = [value for each in self._weak for key, value in each.items() if id(key) in self._seen]
                waiting += [value for value in owned if id(value) not in self._seen]
        return total

    def _size(self, thing: object) -> int:
        """Return the bytes of a tensor's or an array's memory; 0 for other objects and for memory counted before."""
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        elif isinstance(thing, np.ndarray):
            whole = thing.base if isinstance(thing.base, np.ndarray) else thing
            address, size = whole.ctypes.data, whole.nbytes
        else:
            return 0
        if address in self._addresses:
            return 0
        self._addresses.add(address)
        return size


def _parts(thing: object) -> Iterable[Any]:
    """Return the objects that an object refers to, if it is of a kind that may hold tensors."""
    if isinstance(thing, Tensor | np.ndarray):
        return []
    if isinstance(thing, Mapping):
        return [*thing.keys(), *thing.values()]
    if isinstance(thing, list | tuple | set | frozenset | deque):
        return list(thing)
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, MethodType):
        return [thing.__self__]
    if callable(thing) and getattr(thing, "__closure__", None):
        return [cell.cell_contents for cell in thing.__closure__ if _is_filled(cell)]  # type: ignore[attr-defined]
    if isinstance(thing, type) or not (isinstance(thing, nn.Module) or _is_ours(thing)):
        return []
    slots = [getattr(thing, name) for kind in type(thing).__mro__ for name in _slots(kind) if hasattr(thing, name)]
    return [*vars(thing).values(), *slots] if hasattr(thing, "__dict__") else slots


def _is_ours(thing: object) -> bool:
    """Return whether an object's class belongs to vivace."""
    return type(thing).__module__.partition(".")[0] == "vivace"


def _slots(kind: type) -> list[str]:
    """Return the names in a class's ``__slots__``."""
    names = vars(kind).get("__slots__", ())
    return [name for name in ([names] if isinstance(names, str) else names) if name not in ("__dict__", "__weakref__")]


def _is_filled(cell: Any) -> bool:
    """Return whether a closure's cell has a value."""
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name of the enclosing function that has no value yet
        return False


def _reset_high_water() -> bool:
    """Reset the kernel's high-water mark; return whether that is possible."""
    try:
        _CLEAR.write_text(_RESET_HIGH_WATER)
    except OSError:
        return False
    return True


def _read_status(key: str) -> int | None:
    """Return a value of ``/proc/self/status`` in bytes."""
    match = re.search(rf"{key}:\s+(\d+) kB", _STATUS.read_text())
    return int(match[1]) * 1024 if match else None
