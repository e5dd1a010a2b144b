"""Which blocks the slots of a cache have in one pool, and where each block begins, as native kernels read it."""

from __future__ import annotations

import torch
from torch import Tensor

from vivace.core.blocks import Account, BlockPool
from vivace.errors import BusyError

WINDOW_SLACK = 64
"""Entries behind a sliding window that are still kept: rows that are filled in late may read a little further back."""


class BlockTable:
    """The blocks that a pool has given to each slot."""

    def __init__(self, pool: BlockPool, num_slots: int, width: int) -> None:
        self.pool = pool
        self.blocks: list[list[int]] = [[] for _ in range(num_slots)]
        """Of each slot; 0 where a block was given back."""
        self.owns: list[list[bool]] = [[] for _ in range(num_slots)]
        """Whether a slot has written its block itself."""
        self.straight = [0] * num_slots
        """How many of a slot's first blocks have neighbouring numbers."""
        self.planned: list[range] = [range(0)] * num_slots
        self.passed = [0] * num_slots
        """How many of a slot's first blocks the window has passed."""
        with torch.inference_mode(False):
            self.first = torch.zeros((num_slots, width), dtype=torch.int64)
            """(slots, blocks) entry of the pool at which each block begins."""
        self._view = self.first.numpy()
        self._there: Tensor | None = self.first if pool.device.type == "cpu" else None

    @property
    def there(self) -> Tensor:
        """Return ``first`` on the pool's device."""
        if self._there is None:
            self._there = self.first.to(self.pool.device)
        return self._there

    def lies_at(self, there: Tensor) -> None:
        """Let ``there`` be this tensor, whoever fills it: arguments of a recorded step say where blocks begin."""
        self._there = there

    def _set(self, slot: int, place: int, block: int) -> None:
        self.blocks[slot][place] = block
        self._view[slot, place] = block * self.pool.size
        if self._there is not self.first:
            self._there = None
        blocks = self.blocks[slot]
        at = min(self.straight[slot], place)
        while at < len(blocks) and blocks[at] and (at == 0 or blocks[at] == blocks[at - 1] + 1):
            at += 1
        self.straight[slot] = at

    def _wanted(self, slot: int, place: int) -> int | None:
        """Return the block that would be best for a place: behind the one before it, or where a plan begins."""
        before = self.blocks[slot][place - 1] if place else 0
        if before:
            return before + 1
        planned = self.planned[slot]
        return planned[place] if place < len(planned) else None

    def append(self, slot: int, account: Account) -> None:
        """Take one more block for a slot."""
        place = len(self.blocks[slot])
        block = self.pool.take(account, self._wanted(slot, place))
        self.blocks[slot].append(0)
        self.owns[slot].append(True)
        self._set(slot, place, block)

    def own(self, slot: int, entry: int, account: Account) -> None:
        """Copy the block of an entry unless the slot may write there."""
        place, at = divmod(entry, self.pool.size)
        block = self.blocks[slot][place]
        assert block, f"entry {entry} is behind the window"
        if not self.pool.is_writable(block, at, by_its_writer=self.owns[slot][place]):
            try:
                self._set(slot, place, self.pool.copied(block, account, self._wanted(slot, place)))
            except BusyError:  # who made room may have held the block, which needs no copy then
                if not self.pool.is_writable(block, at, by_its_writer=self.owns[slot][place]):
                    raise
        self.owns[slot][place] = True

    def share(self, slot: int, place: int, block: int) -> None:
        """Put a block that is held for the slot into its table, in place of what is there."""
        blocks = self.blocks[slot]
        assert place <= len(blocks)
        if place == len(blocks):
            blocks.append(0)
            self.owns[slot].append(False)
        elif blocks[place]:
            self.pool.give_back([blocks[place]])
        self.owns[slot][place] = False
        self._set(slot, place, block)

    def let_go(self, slot: int, length: int) -> None:
        """Give back the blocks that the window of a text of this length has passed; their places stay."""
        assert self.pool.window is not None
        passed = (length - self.pool.window - WINDOW_SLACK) // self.pool.size
        places = range(self.passed[slot], min(passed, len(self.blocks[slot])))
        self.pool.give_back([self.blocks[slot][place] for place in places])
        for place in places:
            self._set(slot, place, 0)
            self.passed[slot] = place + 1

    def clear(self, slot: int) -> None:
        """Give all blocks of a slot back."""
        self.pool.give_back(self.blocks[slot])
        self.pool.forget(self.planned[slot])
        self._view[slot, : len(self.blocks[slot])] = 0
        if self._there is not self.first:
            self._there = None
        self.blocks[slot], self.owns[slot] = [], []
        self.straight[slot], self.planned[slot], self.passed[slot] = 0, range(0), 0
