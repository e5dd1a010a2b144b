"""Memory under a limit: what weights and drafters have of it, and what blocks of texts take.

Keys and values take memory block by block as texts grow (``core/blocks.py``): those of the target, and those of a
drafter that has a cache of its own. A text is given a slot once there is room for what has been decided of it so far.
Where a running text needs a block and there is none, prompts that were kept for others leave first, the least recently
used before the others; then the youngest text gives its blocks back and waits (``session.py``).

Counted are the weights in memory, what drafters hold (trained weights, a draft model, copies of layers in few bits),
for as long as they live, and the blocks of texts and of kept prompts. Not counted are libraries, and activations of a
pass.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import Counter
from typing import Protocol

from vivace.core.model import Decoder
from vivace.core.seams import Drafter
from vivace.errors import BusyError, MemoryLimitError
from vivace.units import format_bytes

DRAFT_SLACK = 64
"""Entries a draft may use beyond a sequence's own limit, for which memory is set aside."""
WIDEST_DRAFT = 192
"""Entries that the rows of one pass may use there at most: a tree whose nodes have streams takes more than usual."""


def text_bytes(model: Decoder, drafter: Drafter, num_tokens: int) -> int:
    """Keys and values of a text at most, by the time it has so many tokens: the target's and its drafter's own."""
    entries = num_tokens + DRAFT_SLACK
    return model.slot_bytes(entries) + drafter.text_bytes(entries)


class Evictable(Protocol):
    """Keeps blocks that nobody needs, and gives them back when others do: prompts that were read before."""

    @property
    def evictable_bytes(self) -> int:
        """Return the bytes that would be free without it."""
        ...

    def evict(self, num_bytes: int) -> int:
        """Give back at least so many bytes if there are as many; return how many."""
        ...


class MemoryBudget:
    """Counts what an engine has of its memory, and refuses what goes beyond the limit; asked by any thread.

    It fills ``Account``: blocks of keys and values are taken from it.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        """Begin with everything free.

        Args:
            limit_bytes: of weights, drafters and texts together; None only counts.
        """
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        """Of blocks of keys and values, those of kept prompts included."""
        self.most_taken_bytes = 0
        """The most of that there has been."""
        self.least_room_bytes = 0
        """What weights and drafters have to leave for texts."""
        self._held: Counter[str] = Counter()
        self._evictable: weakref.WeakSet[Evictable] = weakref.WeakSet()
        self._lock = threading.RLock()  # what is collected as garbage gives back at any time

    @property
    def held_bytes(self) -> int:
        """Return the bytes that weights and drafters take."""
        with self._lock:
            return self._held.total()

    @property
    def room_bytes(self) -> int | None:
        """Return how many bytes texts may have together; None where there is no limit."""
        return None if self.limit_bytes is None else max(0, self.limit_bytes - self.held_bytes)

    @property
    def free_bytes(self) -> int | None:
        """Return the bytes that neither weights, drafters, texts nor kept prompts have; None without a limit."""
        with self._lock:
            return None if self.limit_bytes is None else self.limit_bytes - self.held_bytes - self.taken_bytes

    @property
    def evictable_bytes(self) -> int:
        """Return the bytes that kept prompts would give back."""
        return sum(kept.evictable_bytes for kept in list(self._evictable))

    @property
    def report(self) -> str:
        """Who has what, in a line."""
        with self._lock:
            return ", ".join(f"{what} {format_bytes(num_bytes)}" for what, num_bytes in self._held.items())

    def hold(self, owner: object, num_bytes: int, what: str) -> None:
        """Count something that stays, for as long as its owner lives.

        Args:
            owner: with whose end the bytes are free again.
            num_bytes: how many.
            what: it is, for messages, such as "method eagle".

        Raises:
            MemoryLimitError: it can never fit beside what stays already.
            BusyError: texts have the room it takes.
        """
        if not num_bytes:
            return
        with self._lock:
            self.check_held(num_bytes, what)
        self._evict_for(num_bytes)
        with self._lock:
            if not self._fits(num_bytes):
                raise BusyError(self._busy(what, num_bytes))
            self._held[what] += num_bytes
        weakref.finalize(owner, self._let_go, num_bytes, what).atexit = False

    def check_held(self, num_bytes: int, what: str, hint: str = "") -> None:
        """Refuse what cannot stay beside what stays already.

        Args:
            num_bytes: how many.
            what: it is, for messages.
            hint: what else can be done than to give more memory.

        Raises:
            MemoryLimitError: says how much is asked for, given, and taken by whom.
        """
        with self._lock:
            needed = self.held_bytes + num_bytes + self.least_room_bytes
            if self.limit_bytes is not None and needed > self.limit_bytes:
                beside = f" beside {self.report}" if self._held else ""
                if self.least_room_bytes:
                    beside += f" and {format_bytes(self.least_room_bytes)} for a text"
                raise MemoryLimitError(
                    f"{format_bytes(self.limit_bytes)} of memory are too few: {what} takes "
                    f"{format_bytes(num_bytes)}{beside}; give at least {format_bytes(needed * 21 // 20)}{hint}"
                )

    def check_text(self, num_bytes: int, num_tokens: int) -> None:
        """Refuse a text that could never be given a slot.

        Args:
            num_bytes: as ``text_bytes`` has them.
            num_tokens: of prompt and answer together, for the message.

        Raises:
            MemoryLimitError: says how much it would take, and how much there is.
        """
        room = self.room_bytes
        if room is not None and num_bytes > room:
            raise MemoryLimitError(
                f"a text of {num_tokens} tokens takes up to {format_bytes(num_bytes)} of keys and values; of "
                f"{format_bytes(self.limit_bytes or 0)} of memory {format_bytes(room)} are left beside {self.report}; "
                "ask for fewer tokens (max_new_tokens, a server's --max-model-len), or give more memory"
            )

    def has_room(self, num_bytes: int) -> bool:
        """Return whether so many bytes are free now, or would be without kept prompts."""
        return self._fits(num_bytes) or self._fits(num_bytes - self.evictable_bytes)

    def take(self, num_bytes: int) -> None:
        """Take bytes for a block; kept prompts make room for it.

        Raises:
            BusyError: others have the room it takes.
        """
        while True:
            with self._lock:
                if self._fits(num_bytes):
                    self.taken_bytes += num_bytes
                    self.most_taken_bytes = max(self.most_taken_bytes, self.taken_bytes)
                    return
            if not self._evict_for(num_bytes):
                raise BusyError(self._busy("this text", num_bytes))

    def give_back(self, num_bytes: int) -> None:
        """Have the bytes of a block again."""
        with self._lock:
            self.taken_bytes -= num_bytes

    def may_evict(self, kept: Evictable) -> None:
        """Ask this for room when there is none, for as long as it lives."""
        self._evictable.add(kept)

    def _evict_for(self, num_bytes: int) -> bool:
        """Let kept prompts make room; return whether there is more now."""
        free = self.free_bytes
        if free is None or num_bytes <= free:
            return True
        return sum(kept.evict(num_bytes - free) for kept in list(self._evictable)) > 0

    def _fits(self, num_bytes: int) -> bool:
        free = self.free_bytes
        return free is None or num_bytes <= free

    def longest_text(self, model: Decoder, drafter: Drafter, most: int) -> int:
        """Tokens of the longest text that can be given a slot, ``most`` at most."""
        room = self.room_bytes
        if room is None:
            return most
        return bisect_right(range(1, most + 1), room, key=lambda count: text_bytes(model, drafter, count))

    def _busy(self, what: str, num_bytes: int) -> str:
        return (
            f"{what} takes {format_bytes(num_bytes)} of memory and {format_bytes(max(0, self.free_bytes or 0))} are "
            f"free now, as other texts have {format_bytes(self.taken_bytes)}; try again when they have ended"
        )

    def _let_go(self, num_bytes: int, what: str) -> None:
        with self._lock:
            self._held[what] -= num_bytes
            self._held += Counter()  # forgets what has nothing any more
