"""Plain decoding, with which every method is compared, and base classes for drafters that remember little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from vivace.core.cache import KVCache
from vivace.core.seams import Context, Decided, Draft, TargetPass, Traversal, Verdict
from vivace.decode.forward import ForwardPass


class NoMemory:
    """The calls of ``SlotState`` for a state that remembers nothing of its sequences."""

    reason: str | None = None
    """None, because there is nothing to choose."""

    def extend(self, slots: Sequence[int], stops: Sequence[int]) -> None:
        """Do nothing: there is no cache of its own that could grow."""

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Do nothing: nothing is remembered that could be copied."""

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Do nothing: there is no state."""

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Do nothing: there is no state."""

    def release(self, slots: Sequence[int]) -> None:
        """Do nothing: there is no state."""

    def saved(self) -> object:
        """Return None: there is no state."""
        return None

    def restore(self, saved: object) -> None:
        """Do nothing: there is no state."""


class OwnsNoCache:
    """A drafter whose states keep no keys and values beside those of the target."""

    @property
    def leaves_all_entries(self) -> bool:
        """Return True: every row passes every layer."""
        return True

    def text_bytes(self, entries: int) -> int:
        """Return 0: the drafter has no cache."""
        return 0


class Stateless(OwnsNoCache, NoMemory):
    """A drafter that remembers no sequence, so it is its own state in every session."""

    def open(self, cache: KVCache) -> Self:
        """Return the drafter itself, which is its own state since it remembers no sequence."""
        return self


class Forgetful(NoMemory):
    """Draft state kept in dictionaries by slot. It drops what it knows of a slot whose text is shortened.

    Such a slot has no drafts until the state has observed its next pass.
    """

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Release these slots: what was kept for them may no longer be part of the text."""
        self.release(slots)

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy what its dictionaries hold by slot."""
        for by_slot in vars(self).values():
            for source, target in zip(sources, targets, strict=True):
                if isinstance(by_slot, dict) and source in by_slot:
                    known = by_slot[source]
                    by_slot[target] = list(known) if isinstance(known, list) else known

    def saved(self) -> object:
        """Return a copy of every dictionary by slot. Their values are lists, which are copied, or objects that never
        change.
        """
        return {
            name: {slot: list(known) if isinstance(known, list) else known for slot, known in by_slot.items()}
            for name, by_slot in vars(self).items()
            if isinstance(by_slot, dict)
        }

    def restore(self, saved: object) -> None:
        """Set the dictionaries back to what ``saved`` returned."""
        assert isinstance(saved, dict)
        vars(self).update(saved)


class NoDrafts(Stateless):
    """Plain decoding: one row per slot and step."""

    def __init__(self, name: str = "plain", traversal: Traversal | None = None) -> None:
        """Set the method's name, and its forward pass where that is not the plain one."""
        self.name = name
        self.traversal: Traversal = ForwardPass() if traversal is None else traversal

    @property
    def leaves_all_entries(self) -> bool:
        """Return whether every row passes every layer, as those of a prompt do."""
        return isinstance(self.traversal, ForwardPass)

    def propose(self, context: Context) -> Draft | Decided:
        """Return the committed tokens without guesses."""
        return context.committed()

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Do nothing: plain decoding learns nothing from a pass."""
