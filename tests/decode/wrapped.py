"""A drafter that passes every call on to another one, for tests that listen to what is proposed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vivace.core.seams import Drafter


@dataclass(eq=False)
class Wrapped:
    """Fills ``Drafter`` but for ``open``."""

    drafter: Drafter

    @property
    def name(self) -> str:
        """Return the name of the drafter inside."""
        return self.drafter.name

    @property
    def leaves_all_entries(self) -> bool:
        """Return what the drafter inside says."""
        return self.drafter.leaves_all_entries

    def text_bytes(self, entries: int) -> int:
        """Return the bytes that the drafter inside takes."""
        return self.drafter.text_bytes(entries)


class WrappedState:
    """Fills ``DraftState``: every call that a subclass does not define goes to the state inside."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)
