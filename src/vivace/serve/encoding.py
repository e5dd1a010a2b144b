"""Writes the JSON of large replies in parts, between which other threads can run.

``json.dumps`` keeps Python's lock until it is done. For an answer with megabytes of log-probabilities that is tenths of
a second.
"""

from __future__ import annotations

import json
from typing import Any

PIECE = 256
"""Number of elements of a list that are written at once."""


def encoded(value: Any) -> bytes:
    """Return the JSON of a value, without spaces."""
    return "".join(_parts(value)).encode()


def _parts(value: Any) -> list[str]:
    if isinstance(value, dict):
        parts, between = ["{"], ""
        for name, one in value.items():
            parts += [between, _dumped(name), ":", *_parts(one)]
            between = ","
        return [*parts, "}"]
    if isinstance(value, list) and len(value) > PIECE:
        pieces = (_dumped(value[start : start + PIECE])[1:-1] for start in range(0, len(value), PIECE))
        return ["[", ",".join(pieces), "]"]
    if isinstance(value, list):
        parts = ["["]
        for place, one in enumerate(value):
            parts += [","] if place else []
            parts += _parts(one)
        return [*parts, "]"]
    return [_dumped(value)]


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
