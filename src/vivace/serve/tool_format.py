"""How models write tool calls, and grammars that make them write one.

The chat template shows the model examples, so it tells which of the known formats the model was trained for:

* ``hermes``: three lines, ``<tool_call>``, ``{"name": ..., "arguments": {...}}`` and ``</tool_call>``, any number of
  times (Hermes, Qwen 2.5 and 3, and many more).
* ``mistral``: ``[TOOL_CALLS]`` and a list of the same objects.
* ``llama``: an answer that is nothing but ``{"name": ..., "parameters": {...}}``, joined by ``;`` (Llama 3).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LAYOUT: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line as most programs print it, so that a model cannot fill an answer with blanks."""


@dataclass(frozen=True)
class ToolFormat:
    """The tags and JSON in which a family of models writes tool calls."""

    name: str
    tag: str
    """Text with which calls begin; if empty, the whole answer is calls when it begins with a brace."""
    key: str
    """Key of the arguments."""
    before: str = ""
    """Text between the tag and a call."""
    after: str = ""
    """Text after every call."""
    between: str = ""
    """Text between two calls."""
    is_list: bool = False
    """Whether one tag precedes all calls, which stand in brackets."""

    @property
    def close(self) -> str:
        """Text that ends a call; if empty, the end of its JSON does."""
        return self.after.strip()


HERMES = ToolFormat("hermes", "<tool_call>", "arguments", before="\n", after="\n</tool_call>", between="\n")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "arguments", between=", ", is_list=True)
LLAMA = ToolFormat("llama", "", "parameters", between="; ")
FORMATS = (HERMES, MISTRAL, LLAMA)


def format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template shows; None if it shows none of the known ones."""
    if "<function=" in template:
        return None  # names and values as XML
    if HERMES.tag in template:
        return HERMES
    if MISTRAL.tag in template:
        return MISTRAL
    return LLAMA if '"parameters"' in template and '"name"' in template else None


def grammar(
    form: ToolFormat,
    functions: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    is_parallel: bool,
    token_of: Callable[[str], int | None],
) -> str:
    """A Lark grammar of answers that are calls and nothing else.

    Args:
        form: how calls are written.
        functions: names, and JSON schemas of the arguments.
        is_parallel: whether there may be several calls.
        token_of: id of a text that is a special token, which a grammar cannot spell.
    """
    special = token_of(form.tag) if form.tag else None
    tag = f"<[{special}]>" if special is not None else _text(form.tag)
    call = _call(form)
    more = f"({_text(form.between)} {'' if form.is_list else tag} {call})*" if is_parallel else ""
    calls = f'{tag} "[" {call} {more} "]"' if form.is_list else f"{tag} {call} {more}"
    return _rules(calls, form, functions)


def rest_grammar(form: ToolFormat, functions: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return a Lark grammar of what follows the tag of one call, for a format that closes calls."""
    assert form.close, "a call ends where its tag closes"
    return _rules(_call(form), form, functions)


def _call(form: ToolFormat) -> str:
    return f'{_text(form.before)} "{{" function "}}" {_text(form.after)}'


def _rules(start: str, form: ToolFormat, functions: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    lines = [f"start: {start}", "function: " + " | ".join(f"f{place}" for place in range(len(functions)))]
    for place, (name, schema) in enumerate(functions):
        head = f'"name": {json.dumps(name)}, "{form.key}": '
        lines.append(f"f{place}: {_text(head)} a{place}")
        lines.append(f"a{place}: %json {json.dumps({**schema, 'x-guidance': LAYOUT})}")
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """Return a text as a Lark literal; nothing for an empty text."""
    return json.dumps(text) if text else ""
