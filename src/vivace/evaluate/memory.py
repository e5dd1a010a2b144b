"""Memory of an answer: what the process had at its peak, and which part of it a decoding method is answerable for.

*Peak memory* is the resident memory of the whole process, or what was allocated on an accelerator. On Linux the
kernel's high-water mark is reset before the work (``/proc/self/clear_refs``); weights that are mapped from a file count
once they have been touched. Elsewhere there is no mark to reset and nothing is reported.

In a bench all methods share one process, so its peak is the same for all of them and says nothing about any.
*Holdings* are counted instead: the bytes of every tensor that a session can reach, as weights of the model, as
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
    """Filled when the work is done."""

    num_bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[PeakMemory]:
    """Measure the highest memory during a block.

    Args:
        device: Where the model runs: a CPU's figure is that of the whole process.

    Yields:
        PeakMemory: its ``num_bytes`` is set when the block ends, None where it cannot be known.
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
    """Bytes of this process that are in memory now; None where the system does not say."""
    return _read_status("VmRSS") if _STATUS.is_file() else None


@dataclass(frozen=True)
class Holdings:
    """Bytes that answering takes, counted from the tensors that are held; libraries and Python come on top."""

    weights: int
    """Of the model as it is kept in memory, packed or quantized."""
    cache: int
    """Keys and values of every slot, up to the longest answer."""
    drafter: int
    """Everything else that the session reaches: what the method needs and plain decoding does not."""


def holdings_of(session: Session, drafter: Drafter) -> Holdings:
    """Count what an answer needs; whatever of the model a drafter reaches counts as the model's.

    Args:
        session: after its first steps, when the drafter has made the copies that it works with.
        drafter: that of its requests.
    """
    weights, cache, besides = held_bytes(session.model, session.cache, (session, drafter))
    return Holdings(weights, cache, besides)


def held_bytes(*owners: object) -> tuple[int, ...]:
    """Bytes of all tensors and arrays that each owner reaches and none of the owners before it does.

    Objects of this project, modules of PyTorch and containers are looked into. Memory that several tensors share
    counts once, and whole: a view of one row holds all of its tensor. What lies in a dictionary with weak keys belongs
    to whoever reaches the key: so copies of layers that were made for a drafter count as the drafter's.

    Args:
        owners: in the order in which what is shared is to be counted.
    """
    tally = _Tally()
    return tuple(tally.add(owner) for owner in owners)


class _Tally:
    """What was counted so far."""

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}
        """Objects by id; held, since an id is taken again once its object is gone."""
        self._addresses: set[int] = set()
        """Of memory that was counted."""
        self._weak: list[Mapping[Any, Any]] = []

    def add(self, owner: object) -> int:
        """Bytes that an owner reaches and that were not counted before."""
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
        """Bytes of a tensor's or an array's memory, 0 for anything else and for what was counted before."""
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
    """What an object consists of, where it is one that may hold tensors."""
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
    return type(thing).__module__.partition(".")[0] == "vivace"


def _slots(kind: type) -> list[str]:
    names = vars(kind).get("__slots__", ())
    return [name for name in ([names] if isinstance(names, str) else names) if name not in ("__dict__", "__weakref__")]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name of the enclosing function that has no value yet
        return False


def _reset_high_water() -> bool:
    try:
        _CLEAR.write_text(_RESET_HIGH_WATER)
    except OSError:
        return False
    return True


def _read_status(key: str) -> int | None:
    match = re.search(rf"{key}:\s+(\d+) kB", _STATUS.read_text())
    return int(match[1]) * 1024 if match else None
