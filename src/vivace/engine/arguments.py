"""Arguments of ``vivace.load``: what has the wrong type is told in a line, before any file is read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from vivace.errors import ConfigError, shown


def check_paths(given: Mapping[str, object]) -> None:
    """Refuse arguments that are neither a path nor None.

    Args:
        given: their values by name; a path is a text, or what ``pathlib`` and its relatives make.

    Raises:
        ConfigError: names the argument and what was found.
    """
    for name, value in given.items():
        if not isinstance(value, str | os.PathLike | None):
            raise ConfigError(f"{name} must be a path, found {shown(value)}")


def check_flags(given: Mapping[str, object]) -> None:
    """Refuse arguments that are neither True, False, 0, 1 nor None: a text such as "no" would count as True.

    Args:
        given: their values by name; those of numpy and PyTorch are taken too.

    Raises:
        ConfigError: names the argument and what was found.
    """
    for name, value in given.items():
        plain = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
        if not isinstance(plain, int | None) or plain not in (None, 0, 1):
            raise ConfigError(f"{name} must be True or False, found {shown(value)}")


def as_texts(name: str, value: object) -> tuple[str, ...]:
    """Return an argument that is a text or several as a tuple.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Iterable) and not isinstance(value, Mapping | bytes | bytearray | memoryview):
        found = tuple(value)
        texts = tuple(one for one in found if isinstance(one, str))
        if len(texts) == len(found):
            return texts
    raise ConfigError(f"{name} must be a text or a list of texts, found {shown(value)}")
