"""No drafts: the decoder every other method is compared with; and what drafters remember that remember little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from vivace.core.cache import KVCache
from vivace.core.seams import Context, Decided, Draft, TargetPass, Traversal, Verdict
from vivace.decode.forward import ForwardPass


class NoMemory:
    """The calls of ``SlotState`` for a draft state that keeps nothing between them."""

    reason: str | None = None
    """There is nothing to choose."""

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Nothing to keep."""

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Nothing to forget."""

    def release(self, slots: Sequence[int]) -> None:
        """Nothing to forget."""

    def saved(self) -> object:
        """Nothing."""
        return None

    def restore(self, saved: object) -> None:
        """Nothing to go back to."""


class OwnsNoCache:
    """A drafter whose states keep no keys and values beside the target's."""

    def text_bytes(self, entries: int) -> int:
        """Nothing."""
        return 0


class Stateless(OwnsNoCache, NoMemory):
    """A drafter that remembers no sequence: it is its own state in every session."""

    def open(self, cache: KVCache) -> Self:
        """Itself, since there is nothing to keep apart."""
        return self


class Forgetful(NoMemory):
    """Draft state that drops what it knows of a slot where its text changes, and drafts without until it sees more."""

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """What was kept may be gone."""
        self.release(slots)

    def saved(self) -> object:
        """What its dictionaries hold by slot; their values are replaced as texts go on, or are lists that grow."""
        return {
            name: {slot: list(known) if isinstance(known, list) else known for slot, known in by_slot.items()}
            for name, by_slot in vars(self).items()
            if isinstance(by_slot, dict)
        }

    def restore(self, saved: object) -> None:
        """Know that again."""
        assert isinstance(saved, dict)
        vars(self).update(saved)


class NoDrafts(Stateless):
    """Plain decoding: one row per slot and step."""

    def __init__(self, name: str = "plain", traversal: Traversal | None = None) -> None:
        """Give the way up another name if it is another than all rows together."""
        self.name = name
        self.traversal: Traversal = ForwardPass() if traversal is None else traversal

    def propose(self, context: Context) -> Draft | Decided:
        """The decided tokens alone."""
        return context.committed()

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Nothing to learn."""
