"""Experts that are being read into their slots."""

from __future__ import annotations

from vivace.storage.experts.slots import Slot
from vivace.storage.experts.store import ExpertStore
from vivace.storage.io.async_reader import PendingRead


class ExpertFetches:
    """Reads under way from an expert store, the most urgent first."""

    def __init__(self, store: ExpertStore, *, num_threads: int, chunk_bytes: int) -> None:
        """Open a reader of the store; ``close`` closes it.

        Args:
            store: where experts lie.
            num_threads: reads under way at once.
            chunk_bytes: most bytes of one read, a multiple of 4096.
        """
        self._store = store
        self.reader = store.open_reader(num_threads=num_threads, chunk_bytes=chunk_bytes)
        self._slot_of: dict[PendingRead, Slot] = {}
        self._most = max(2, -(-2 * num_threads * chunk_bytes // store.expert_bytes))

    def __len__(self) -> int:
        """Slots that are being filled."""
        return len(self._slot_of)

    @property
    def is_busy(self) -> bool:
        """Whether the threads have enough to do: what is predicted had better wait where it can be dropped again."""
        return len(self) >= self._most

    @property
    def slots(self) -> list[Slot]:
        """The slots that are being filled."""
        return list(self._slot_of.values())

    def begin(self, slot: Slot, due: int, rank: int) -> None:
        """Begin to read the expert of a slot.

        Args:
            slot: to be filled; it has its key.
            due: clock of the layer that needs it; the earliest are read first.
            rank: among those due at once, the lowest are read first.
        """
        assert slot.key is not None
        slot.due = due
        slot.read = self.reader.submit_whole(slot.memory, self._store.offset(slot.key), due, rank)
        self._slot_of[slot.read] = slot

    def reschedule(self, slot: Slot, due: int) -> None:
        """Change when a slot is needed, if it is still being filled."""
        if slot.read is not None:
            slot.due = due
            self.reader.reschedule(slot.read, due)

    def completed(self, *, waits: bool) -> list[Slot]:
        """Return the slots whose reads have ended since the last call, with the error of those that failed.

        Args:
            waits: block until there is one, if any is being filled.
        """
        if not self._slot_of:
            return []
        ended = []
        for read in self.reader.completed(waits=waits):
            slot = self._slot_of.pop(read)
            slot.read, slot.error = None, read.error
            ended.append(slot)
        return ended

    def close(self) -> None:
        """Stop reading."""
        self.reader.close()
