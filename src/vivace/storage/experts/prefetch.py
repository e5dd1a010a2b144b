"""Experts that are predicted and whose reads have not begun.

They wait here rather than in the reader as long as that has enough to do, because here a prediction can be withdrawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from vivace.storage.experts.policy import Key


class PrefetchQueue:
    """Predicted experts by urgency: the clock at which they are due, then their rank in the prediction."""

    def __init__(self) -> None:
        self._urgency: dict[Key, tuple[int, int]] = {}
        self._predictions: dict[int, Sequence[int]] = {}
        """The last prediction for each layer."""

    def __bool__(self) -> bool:
        """Return whether an expert is waiting."""
        return bool(self._urgency)

    def replace(self, layer: int, likely: Sequence[int]) -> list[Key]:
        """Take a new prediction for a layer, and return the experts of the one before that are not in it any more."""
        withdrawn = [(layer, expert) for expert in self._predictions.get(layer, ()) if expert not in likely]
        self._predictions[layer] = likely
        for key in withdrawn:
            self.drop(key)
        return withdrawn

    def add(self, key: Key, due: int, rank: int) -> None:
        """Let an expert wait, or raise its urgency."""
        self._urgency[key] = min(self._urgency.get(key, (due, rank)), (due, rank))

    def drop(self, key: Key) -> None:
        """Let an expert wait no longer, if it does."""
        self._urgency.pop(key, None)

    def drop_until(self, clock: int) -> None:
        """Drop the experts whose layer has run."""
        self._urgency = {key: urgency for key, urgency in self._urgency.items() if urgency[0] > clock}

    def most_urgent(self) -> tuple[Key, int, int]:
        """Return the expert that goes first, the clock at which it is due, and its rank."""
        key = min(self._urgency, key=self._urgency.__getitem__)
        return key, *self._urgency[key]
