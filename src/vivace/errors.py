"""All errors that vivace raises on purpose, as one tree.

    VivaceError
    ├── UsageError             what was asked for cannot be done; the command line exits with 2
    │   ├── ConfigError        a field, key or value is unknown or out of range
    │   ├── UnsupportedError   a model, method or combination is not supported by this version
    │   ├── CapacityError      something is longer, larger or more than there is room for
    │   │   └── MemoryLimitError   it is more than the memory limit can ever hold
    │   └── NoTokenError       a request's settings exclude every token that could come next
    ├── CheckpointError        a file on disk is not what it should be
    │   ├── NotFoundError      there is nothing where something was expected
    │   ├── MismatchError      a file belongs to another model, tokenizer or base
    │   └── CorruptError       a file is half-written, truncated or unreadable
    ├── DecodingError          one request failed while it was decoded; others continue
    ├── BusyError              the memory that was asked for is in use; it may be asked for again later
    ├── WorldError             a rank of a model on several machines is gone, hangs or differs from the others
    └── DependencyError        an optional package is missing; the message names the extra to install

A message is one line: what was asked, what was found (both numbers), what to do. Errors of other
libraries are mapped where we call them, never further up; on the command line a ``UsageError`` exits
with 2 and any other with 1.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from difflib import get_close_matches


class VivaceError(Exception):
    """Base class of all errors that are raised on purpose."""

    exit_code: int = 1
    """Exit status of a command that ends with this error."""


class UsageError(VivaceError):
    """What was asked for cannot be done."""

    exit_code = 2

    def __init__(self, message: str = "", *, field: str | None = None) -> None:
        """Say what is wrong, and which field or setting is at fault where it is one."""
        super().__init__(message)
        self.field = field


class ConfigError(UsageError):
    """A field, key or value is unknown or out of range."""


class UnsupportedError(UsageError):
    """A model, method or combination is not supported by this version."""


class CapacityError(UsageError):
    """Something is longer, larger or more than there is room for."""


class MemoryLimitError(CapacityError):
    """More than the memory that was given can ever hold."""


class NoTokenError(UsageError):
    """The settings of a request exclude every token that could come next."""


class CheckpointError(VivaceError):
    """A file on disk is not what it should be."""


class NotFoundError(CheckpointError):
    """There is nothing where something was expected."""


class MismatchError(CheckpointError):
    """A file belongs to another model, tokenizer or base."""


class CorruptError(CheckpointError):
    """A file is half-written, truncated or unreadable."""


class DecodingError(VivaceError):
    """One request failed while it was decoded; the requests beside it continue."""


class BusyError(VivaceError):
    """The memory that something takes is with others now; the same may be asked again later."""


class WorldError(VivaceError):
    """A rank of a model on several machines is gone, hangs, or differs from the others; the whole model has ended."""


class DependencyError(VivaceError):
    """An optional package is missing."""


def shown(value: object) -> str:
    """Return a value as messages show it: on one line, and cut where it is long."""
    try:
        return " ".join(reprlib.repr(value).split())
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "a number of thousands of digits"


def nearest(word: object, known: Iterable[str]) -> str:
    """Return a hint for a word that is not in a closed set, to be appended to a message.

    Args:
        word: the word that was written, or what stands in its place and is no text.
        known: the words that are allowed.

    Returns:
        ``"; did you mean 'x'?"`` for a close match, else ``"; choose from a, b, c"``.
    """
    choices = sorted(known)
    if not isinstance(word, str):
        return f"; choose from {', '.join(choices)}"
    turned = [choice for choice in choices if sorted(choice.split("+")) == sorted(word.split("+"))]
    close = turned or get_close_matches(word, choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; choose from {', '.join(choices)}"
