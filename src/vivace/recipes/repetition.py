"""Finds out where a text has begun to repeat itself, as greedy answers of small models do.

Of a 135 M chat model's answers up to 512 tokens long, a lookup of the last three tokens foretells 18 % of the first 64
tokens, 61 % of the next 64 and 90 % of those behind 192: most of such text is a loop. A drafter learns nothing from it,
and what repeats needs no drafter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

LAST = 3
"""Number of tokens by which a continuation is looked up."""
WINDOW = 32
"""Number of last tokens that are judged."""
FORETOLD = 28
"""A text repeats itself once so many of them are what followed the ``LAST`` tokens before them the last time."""


class Repetition:
    """Follows one text as it is written."""

    def __init__(self) -> None:
        """Begin with an empty text."""
        self._last: deque[int] = deque(maxlen=LAST)
        self._next: dict[tuple[int, ...], int] = {}
        self._foretold: deque[bool] = deque(maxlen=WINDOW)

    @property
    def is_found(self) -> bool:
        """Return whether the text repeats itself at its end."""
        return sum(self._foretold) >= FORETOLD

    def read(self, tokens: Iterable[int]) -> None:
        """Read the next tokens."""
        for token in tokens:
            last = tuple(self._last)
            self._foretold.append(self._next.get(last) == token)
            self._next[last] = token
            self._last.append(token)
