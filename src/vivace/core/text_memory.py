"""The calls by which memory of texts is taken before a pass, and shared by texts that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextMemory(Protocol):
    """Has entries of its own for the sequences of one session, or none."""

    def extend(self, slots: Sequence[int], stops: Sequence[int]) -> None:
        """Take memory for the entries up to ``stop - 1`` of each slot.

        Raises:
            BusyError: there is no memory for them now.
        """
        ...

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Let each target, an empty slot, begin with all that its source has."""
        ...
