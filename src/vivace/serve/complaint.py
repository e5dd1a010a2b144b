"""What is wrong with a body, in one sentence that names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vivace.errors import nearest
from vivace.serve.bodies import ChatBody, CompletionBody
from vivace.serve.foreign import REFUSED
from vivace.serve.refusal import Refusal

_KNOWN = frozenset({*ChatBody.model_fields, *CompletionBody.model_fields})


def complaint(errors: Sequence[Mapping[str, Any]]) -> Refusal:
    """The first of pydantic's errors as a refusal; fields that are not supported come first."""
    error = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    place = [str(step) for step in error["loc"] if step != "body"]
    param = ".".join(place) or None
    if error["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON: {error.get('ctx', {}).get('error', 'it cannot be read')}")
    if error["type"] == "extra_forbidden":
        return _unsupported(place, param)
    if error["type"] == "missing":
        return Refusal(400, f"{param or 'the body'} is missing", param=param)
    message = str(error["msg"]).removeprefix("Value error, ")
    if param is None and message.split(" ")[0] in _KNOWN:
        param = message.split(" ")[0]
    found = repr(error.get("input"))
    shown = "" if error["type"] == "value_error" else f", found {found[:80] + '...' if len(found) > 80 else found}"
    return Refusal(400, f"{param or 'the body'}: {message[:1].lower()}{message[1:]}{shown}", param=param)


def _unsupported(place: Sequence[str], param: str | None) -> Refusal:
    name = place[-1][:100]
    if len(place) > 1:
        why = ""
    elif name in REFUSED:
        why = f"; {REFUSED[name]}"
    elif name in _KNOWN:
        why = "; it belongs to another route"
    else:
        why = nearest(name, _KNOWN)
        why = why if "did you mean" in why else ""
    return Refusal(
        400, f"the field {name!r} is not supported by this server{why}", param=param, code="unsupported_field"
    )
