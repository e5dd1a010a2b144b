"""Bytes that objects hold: every tensor and array that can be reached from them, counted once.

This is what memory limits count of weights and drafters (``decode/memory.py``) and what a bench reports of them
(``evaluate/memory.py``).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from vivace.core.blocks import BlockStore
from vivace.core.cache import KVCache


def held_bytes(*owners: object) -> tuple[int, ...]:
    """Return the bytes of all tensors and arrays that each owner refers to and no owner before it does.

    Objects of this project, modules of PyTorch and containers are searched recursively. Memory that several tensors
    share counts once, and completely: a view of one row holds all of its tensor. The values of a dictionary with weak
    keys count for the owner that refers to the key, so copies of layers that were made for a drafter count as the
    drafter's. A cache counts with the blocks that its texts may come to have; the store they come from is nobody's.

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
            return thing.most_bytes if isinstance(thing, KVCache) else 0
        if address in self._addresses:
            return 0
        self._addresses.add(address)
        return size


def _parts(thing: object) -> Iterable[Any]:
    """Return the objects that an object refers to, if it is of a kind that may hold tensors."""
    if isinstance(thing, Tensor | np.ndarray):
        return []
    if isinstance(thing, BlockStore):
        return []
    if isinstance(thing, KVCache):
        return [thing.adapters, thing.pending]
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
