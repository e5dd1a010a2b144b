"""Describes what is wrong with a body in one sentence that names the field."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from vivace.errors import nearest
from vivace.serve.api_error import APIError
from vivace.serve.bodies import Body, ChatBody, CompletionBody
from vivace.serve.foreign import REFUSED

_KNOWN = frozenset({*ChatBody.model_fields, *CompletionBody.model_fields})

_ALTERNATIVE = re.compile(r"str|int|(list|dict)\[.*|constrained-.*")
"""What pydantic adds to the place of an error for each type of a field that may have several."""

B = TypeVar("B", bound=Body)


def fields_of(kind: type[B], raw: bytes) -> B:
    """The fields of a body.

    Args:
        kind: which there are.
        raw: the JSON.

    Raises:
        Refusal: what is wrong with it.
    """
    try:
        values = from_json(raw)
    except ValueError as exc:
        why = str(exc)
        if "hex escape" in why:  # JSON can spell half of a surrogate pair, which is no text
            why += "; send valid Unicode"
        raise APIError(400, f"the body is not JSON: {why}") from None
    try:
        return kind.model_validate(values)
    except ValidationError as exc:
        # lists end at their first error, and of unknown fields one is left: the errors are never many
        raise validation_error(exc.errors(include_url=False)) from None


def validation_error(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """Return the first of pydantic's errors as an API error; unsupported fields come first."""
    error = next((error for error in errors if error["type"] == "extra_forbidden"), _furthest(errors))
    place = [str(step)[:100] for step in error["loc"] if not _ALTERNATIVE.fullmatch(str(step))]
    param = ".".join(place) or None
    if error["type"] == "extra_forbidden":
        return _unsupported(place, param)
    if error["type"] == "missing":
        return APIError(400, f"{param or 'the body'} is missing", param=param)
    message = str(error["msg"]).removeprefix("Value error, ")
    if param is None and message.split(" ")[0] in _KNOWN:
        param = message.split(" ")[0]
    found = " ".join(reprlib.repr(error.get("input")).split())
    shown = "" if error["type"] == "value_error" else f", found {found[:80] + '...' if len(found) > 80 else found}"
    return APIError(400, f"{param or 'the body'}: {message[:1].lower()}{message[1:]}{shown}", param=param)


def _furthest(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the first error; if its field may have several types, that of the type which fits most of the value."""
    first = errors[0]["loc"]
    if len(first) < 2 or not _ALTERNATIVE.fullmatch(str(first[1])):
        return errors[0]
    of_field = [error for error in errors if error["loc"][:1] == first[:1]]
    return max(of_field, key=lambda error: (error["type"] == "too_long", len(error["loc"]), str(error["loc"][2:])))


def _unsupported(place: Sequence[str], param: str | None) -> APIError:
    name = place[-1]
    if len(place) > 1:
        why = ""
    elif name in REFUSED:
        why = f"; {REFUSED[name]}"
    elif name in _KNOWN:
        why = "; it belongs to another route"
    else:
        why = nearest(name, _KNOWN)
        why = why if "did you mean" in why else ""
    return APIError(
        400, f"the field {name!r} is not supported by this server{why}", param=param, code="unsupported_field"
    )
