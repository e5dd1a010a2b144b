"""How the rows of a call are laid out: which follow one another, how long their texts are, and what each reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vivace.kernels.reference import KEY_BLOCK

if TYPE_CHECKING:
    from vivace.core.cache import KVCache
    from vivace.core.seams import Draft


def extent_of(slots: list[int], firsts: list[int], position: Tensor, memory: KVCache) -> Tensor | None:
    """Return the length of each row's text: its prompt's length, or its position + 1 where that is more; or None.

    ``firsts`` are positions that the rows' positions are not below.
    """
    if all(memory.prompts[slot] <= first + 1 for slot, first in zip(slots, firsts, strict=True)):
        return None
    prompts = torch.tensor([memory.prompts[slot] for slot in slots], device=position.device)
    return torch.maximum(position + 1, prompts)


def indexed(slot: Tensor, position: Tensor, readable: Mapping[int, Tensor], num_slots: int) -> tuple[Tensor, Tensor]:
    """Return ``seen`` and ``index`` of rows (T,) that read only some positions of their slots.

    Rows of ``index`` are filled up with their first entry, so that what nobody reads is never looked at.
    """
    longest = max(map(len, readable.values()))
    width = -(-longest // KEY_BLOCK) * KEY_BLOCK
    index = torch.zeros((num_slots, width), dtype=torch.int64, device=slot.device)
    seen = torch.empty_like(position)
    for each, given in readable.items():
        positions = given.to(slot.device)
        index[each] = positions[0]
        index[each, : len(positions)] = positions
        rows = (slot == each).nonzero()[:, 0]
        seen[rows] = torch.searchsorted(positions, position[rows]) + 1
    return seen, index


def runs_of(slots: list[int]) -> tuple[tuple[int, int, int], ...]:
    """Return runs of neighbouring rows of one slot as (slot, first row, one past the last)."""
    runs: list[tuple[int, int, int]] = []
    first = 0
    for row in range(1, len(slots) + 1):
        if row == len(slots) or slots[row] != slots[first]:
            runs.append((slots[first], first, row))
            first = row
    return tuple(runs)


def tree_of(draft: Draft, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return ``position``, ``seen`` and ``tail`` of tree nodes, and the last position.

    A node reads stored entries first, then the path to itself.
    """
    nodes, parents = draft.places.node, draft.places.parent
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        above = paths[parent] if parent >= 0 else []
        paths.append([*above, lengths[row] + nodes[row]])
    longest = max(len(path) for path in paths)
    tail = torch.tensor([path + [-1] * (longest - len(path)) for path in paths], device=draft.device)
    ends = [length + len(path) - 1 for length, path in zip(lengths, paths, strict=True)]
    return torch.tensor(ends, device=draft.device), torch.tensor(lengths, device=draft.device), tail, max(ends)
