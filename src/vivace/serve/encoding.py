"""JSON of large replies, in pieces between which other threads go on.

``json.dumps`` keeps Python's lock until it is done, which for an answer with log-probabilities of megabytes is
tenths of seconds. In pieces it never does so for long.
"""

from __future__ import annotations

import json
from typing import Any

PIECE = 256
"""Elements of a list that are written at once."""


def encoded(value: Any) -> bytes:
    """The JSON of a value, without spaces."""
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
