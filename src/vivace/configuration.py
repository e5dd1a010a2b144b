"""Building frozen dataclasses from mappings read from files; an unknown key is an error that names the nearest
match.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from vivace.errors import ConfigError, nearest, shown

log = logging.getLogger(__name__)

T = TypeVar("T")


def build(kind: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Build a frozen dataclass from a mapping, strictly.

    Args:
        kind: the dataclass; nested dataclasses and tuples are built too. Its class variable ``RENAMED``, if there is
            one, maps old names of fields, which recipes and saved files may still have, to the present ones.
        values: the mapping.
        where: path of keys leading to the mapping, for messages.

    Raises:
        ConfigError: a key is unknown (the message names the nearest) or missing, a value has another type, or it is no
            mapping.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where.rstrip('.: ') or 'a configuration'} must be a mapping, found {shown(values)}")
    values = _renamed(values, getattr(kind, "RENAMED", {}), where)
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, kind))}
    for key in values:
        if key not in fields:
            raise ConfigError(f"unknown key {where}{key}{nearest(key, fields)}")
    missing = [
        name
        for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where or 'the recipe '}needs {', '.join(missing)}")
    return kind(**{key: _value(hints[key], value, f"{where}{key}") for key, value in values.items()})


def _renamed(values: Mapping[str, Any], renamed: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return the mapping with present names of fields; where both names are given, the later one counts."""
    present: dict[str, Any] = {}
    for key, value in values.items():
        if key in renamed:
            _warn_of(f"{where}{key}", f"{where}{renamed[key]}")
        present[renamed.get(key, key)] = value
    return present


@cache
def _warn_of(old: str, new: str) -> None:
    """Log once that a key has a new name."""
    log.warning("%s is called %s now; the old name is read until version 0.3", old, new)


def _value(hint: Any, value: Any, where: str) -> Any:
    """Return ``value`` converted to the annotated type, or raise an error that names the key."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        return _first_that_fits([a for a in args if a is not type(None)], value, where)
    if origin is typing.Literal:
        if value not in args:
            raise ConfigError(f"{where} must be one of {', '.join(map(str, args))}, found {value!r}")
        return value
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(typing.cast(type[Any], hint), value, f"{where}.")
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_value(args[0], item, f"{where}[{place}]") for place, item in enumerate(value))
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        value = _number(value, where)
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{where} is not a number")
    plain = origin or hint
    if plain is Any or (isinstance(value, plain) and not (plain is int and isinstance(value, bool))):
        return value
    raise ConfigError(f"{where} must be {getattr(plain, '__name__', plain)}, found {value!r}")


def _number(value: int | str, where: str) -> float:
    """Return a number that is spelt without a point; to YAML "1e-3" is a text."""
    try:
        return float(value)
    except (OverflowError, ValueError) as error:
        raise ConfigError(f"{where} must be float, found {value!r}") from error


def _first_that_fits(hints: list[Any], value: Any, where: str) -> Any:
    """Convert the value to the first type of a union that accepts it."""
    for hint in hints[:-1]:
        try:
            return _value(hint, value, where)
        except ConfigError:
            continue
    return _value(hints[-1], value, where)
