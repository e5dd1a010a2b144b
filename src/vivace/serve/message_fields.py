"""Refuses fields of messages that would have no effect on the prompt, so that nothing is ignored.

Clients send whole messages back, as they got them: empty values are accepted. A message of a tool also has to say which
call it answers. Few templates write that, most show the answers in the order of the calls; so where answers have this
order, what they say of their calls is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from vivace.adapters.guard.untrusted import ROLE
from vivace.errors import nearest
from vivace.serve.api_error import APIError
from vivace.serve.body_parts import Message
from vivace.serve.chat_template import EVERY

_EMPTY: tuple[Any, ...] = ("", [], {})


def check_fields(messages: Sequence[Message], read: Set[str]) -> None:
    """Check that every field of a conversation has an effect.

    Args:
        messages: the conversation.
        read: fields that the chat template reads.

    Raises:
        APIError: a field has none; the message names it.
    """
    unanswered: Iterator[Any] = iter(())
    for place, message in enumerate(messages):
        fields = message.model_extra or {}
        if isinstance(fields.get("tool_calls"), list):
            unanswered = iter(fields["tool_calls"])
        known = _known_of(next(unanswered, None)) if message.role == "tool" else {}
        for name, value in fields.items():
            is_read = message.role != ROLE and not read.isdisjoint({name, EVERY})
            if not is_read and value not in _EMPTY and known.get(name) != value:
                param = f"messages.{place}.{name[:100]}"
                raise APIError(400, f"{param}: {_reason(message, name[:100], read)}", param=param)


def _known_of(call: Any) -> Mapping[str, Any]:
    """Return what the answer of a tool may say of the call that it answers."""
    if not isinstance(call, dict):
        return {}
    function = call.get("function")
    return {"tool_call_id": call.get("id"), "name": function.get("name") if isinstance(function, dict) else None}


def _reason(message: Message, name: str, read: Set[str]) -> str:
    """Return why a field has no effect, and what to do."""
    if message.role == ROLE:
        return f"a message of the role {ROLE!r} has no field {name!r}, only content; leave it out"
    why = f"the chat template of this model does not read {name!r}"
    if message.role == "tool" and name == "tool_call_id":
        return f"{why}, so answers have to follow their calls in the same order; this one does not"
    hint = nearest(name, {"role", "content", *read})
    return why + (hint if "did you mean" in hint else "; leave it out")
