"""Hooks that let plain autograd keep little of a clustering, with the same bits: marshaling, uniquification, sharding.

What autograd saves for the backward pass goes through ``pack`` and comes back through ``unpack``
(``torch.autograd.graph.saved_tensors_hooks``):

* *marshaling*: a tensor that was saved before, or is a view of the same memory, is kept once;
* *uniquification*: rows of a map are equal where weights of a tile are equal, and bfloat16 weights have few values. Of
  such a tensor one row for each value is kept, and one list, shared by all tensors, of the row of each weight;
* *sharding*: that list is divided among the processes of a group, which hold the same weights, and gathered on the way
  back.

Source: Cho et al. 2024, arXiv:2309.00964, whose open implementation recognises tensors by the names of operations and
needs CUDA and a process group. **Where we differ**: tensors are recognised by their memory, what is equal is compared
before it is left out, and neither CUDA nor a group is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

SMALLEST = 1024
"""Elements below which a tensor is kept as it is."""


@dataclass(frozen=True)
class _Rows:
    """A tensor (G, n, ...) as one row for each different weight of a tile."""

    table: Tensor
    shape: torch.Size


@dataclass(frozen=True)
class _Reference:
    """A tensor that was saved before, as ``source`` says, or a view of it."""

    source: Any
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class SavedTensors:
    """Packs what autograd saves while the weights of some tiles are clustered."""

    weights: Tensor
    """(G, n) weights, bfloat16 or wider."""
    marshals: bool = True
    uniquifies: bool = True
    group: Any = None
    """Process group whose processes hold the same weights and share the list; None keeps all of it here."""
    kept_bytes: int = 0
    """Bytes that were kept, the weights themselves not counted."""
    _known: dict[int, tuple[StorageWeakRef, int, Any, torch.Size, tuple[int, ...], int]] = field(default_factory=dict)
    _index: Tensor | None = None
    _first: Tensor | None = None
    _whole: Tensor | None = None
    """All of the list, while tensors are packed."""
    _length: int = 0

    def __post_init__(self) -> None:
        if self.uniquifies:
            self._number()

    def pack(self, tensor: Tensor) -> Any:
        """Return what is kept of a tensor."""
        if tensor.numel() < SMALLEST:
            return self._keep(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() == self.weights.untyped_storage().data_ptr():
            return tensor
        found = self._known.get(storage.data_ptr()) if self.marshals else None
        if found is not None and not found[0].expired() and found[1] == tensor._version:
            return _Reference(found[2], tensor.shape, tensor.stride(), int(tensor.storage_offset()) - found[5])
        rows = self._rows_of(tensor)
        kept: Any = self._keep(tensor) if rows is None else rows
        if tensor.numel() * tensor.element_size() == storage.nbytes():  # views of it can be made again
            offset = int(tensor.storage_offset())
            seen = StorageWeakRef(storage), tensor._version
            self._known[storage.data_ptr()] = (*seen, kept, tensor.shape, tensor.stride(), offset)
        return kept

    def unpack(self, kept: Any) -> Tensor:
        """Return the tensor that ``pack`` was given, with the same bits."""
        if isinstance(kept, _Reference):
            whole = self.unpack(kept.source)
            return whole.as_strided(kept.shape, kept.stride, whole.storage_offset() + kept.offset)
        if isinstance(kept, _Rows):
            return kept.table[self._gathered()].view(kept.shape)
        assert isinstance(kept, Tensor)
        return kept

    def _keep(self, tensor: Tensor) -> Tensor:
        self.kept_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def _number(self) -> None:
        """Number the different weights of every tile."""
        tiles, count = self.weights.shape
        plain = self.weights.detach()
        if plain.dtype != torch.bfloat16 and torch.equal(plain.bfloat16().to(plain.dtype), plain):
            plain = plain.bfloat16()
        if plain.dtype != torch.bfloat16:
            return
        keys = plain.contiguous().view(torch.int16).int() + 32768 + 65536 * torch.arange(tiles)[:, None].int()
        known, index = torch.unique(keys, return_inverse=True)
        index = index.flatten()
        first = torch.empty(len(known), dtype=torch.int64)
        first[index.flip(0)] = torch.arange(tiles * count - 1, -1, -1)
        self._first = first
        narrow = index.to(torch.int32) if len(known) > 32768 else index.to(torch.int16)
        self._length, self._whole = len(narrow), index
        if self.group is not None:
            import torch.distributed as dist

            size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
            each = -(-len(narrow) // size)
            padded = torch.cat((narrow, narrow.new_zeros(each * size - len(narrow))))
            narrow = padded[rank * each : (rank + 1) * each].clone()
        self._index = narrow
        self.kept_bytes += narrow.nbytes

    def _rows_of(self, tensor: Tensor) -> _Rows | None:
        """Return a tensor as one row for each different weight; None if that is not what it consists of."""
        if self._first is None or self._whole is None or not tensor.is_contiguous():
            return None
        tiles, count = self.weights.shape
        if tensor.dim() not in (2, 3) or tensor.shape[:2] != (tiles, count):
            return None
        rows = tensor.reshape(tiles * count, -1)
        table = rows[self._first]
        if table.numel() * 2 > rows.numel() or not torch.equal(table[self._whole], rows):
            return None
        self.kept_bytes += table.nbytes
        return _Rows(table, tensor.shape)

    def close(self) -> None:
        """Let go of what only packing needs."""
        self._first = self._whole = None

    def _gathered(self) -> Tensor:
        """Return the row of every weight, from all processes that hold a part of the list."""
        assert self._index is not None
        if self.group is None:
            return self._index.long()
        import torch.distributed as dist

        mine = self._index.view(torch.uint8)  # gloo sends no integers of sixteen bits
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, mine, group=self.group)
        return torch.cat(parts).view(self._index.dtype)[: self._length].long()


@contextmanager
def few_saved(
    weights: Tensor, *, marshals: bool = True, uniquifies: bool = True, group: Any = None
) -> Iterator[SavedTensors]:
    """Keep little of what autograd saves while the block clusters ``weights`` (G, n); gradients have the same bits."""
    saved = SavedTensors(weights, marshals, uniquifies, group)
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            yield saved
    finally:
        saved.close()
