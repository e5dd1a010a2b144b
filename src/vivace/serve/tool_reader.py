"""Reads tool calls out of an answer while it is written.

What is not a call stays text, also what first looked like one: nothing that a model wrote is lost. Arguments are passed
on as the model wrote them, piece by piece, as soon as the name is known.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from vivace.serve.tool_format import ToolFormat

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
PYTHON_TAG = "<|python_tag|>"
"""Token that Llama 3 may write before calls."""


@dataclass
class ToolCall:
    """One call, as far as it is written."""

    id: str
    name: str
    arguments: str = ""

    @property
    def whole(self) -> dict[str, Any]:
        """Return the call as OpenAI's messages contain it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class Read:
    """What a piece of an answer added."""

    text: str = ""
    deltas: list[dict[str, Any]] = field(default_factory=list)
    """Parts of calls, as streams contain them."""


@dataclass
class _Braces:
    """Finds where JSON ends that comes in pieces, by its braces and brackets outside of strings."""

    depth: int = 0
    """How many are open."""
    is_string: bool = False
    is_escaped: bool = False

    def end(self, text: str) -> int:
        """Read on; return the place behind the character that closes the last one, -1 if none does."""
        for place, char in enumerate(text, 1):
            if self.is_string:
                self.is_string = self.is_escaped or char != '"'
                self.is_escaped = char == "\\" and not self.is_escaped
            elif char == '"':
                self.is_string = True
            else:
                self.depth += (char in "{[") - (char in "}]")
            if self.depth == 0:
                return place
        return -1


class ToolReader:
    """Divides one answer into text and calls."""

    def __init__(self, form: ToolFormat, *, only_one: bool = False, names: Collection[str] = ()) -> None:
        """Begin with nothing.

        Args:
            form: how the model writes calls.
            only_one: leave out whatever follows the first call.
            names: of the functions that there are; where a format has no tag, JSON that names another one is text.
                Empty takes every name.
        """
        self.calls: list[ToolCall] = []
        self._form = form
        self._only_one = only_one
        self._names = names
        self._before = ""
        """What was taken off before a call; it is text if none comes."""
        self._left = ""
        """Text that is not interpreted yet."""
        self._braces = _Braces()
        self._state: Callable[[bool], bool] = self._say if form.tag else self._begin
        self._read = Read()

    @property
    def is_cut(self) -> bool:
        """Return whether the arguments of the last call have not come to their end."""
        return self._state == self._arguments

    def push(self, text: str, *, is_last: bool = False) -> Read:
        """Read more of the answer; return what will not change any more."""
        self._read = Read()
        self._left += text
        while self._state(is_last):
            pass
        return self._read

    # Every state takes what it understands off ``_left`` and says whether another one can go on.

    def _begin(self, is_last: bool) -> bool:
        """Decide whether an answer without a tag is calls throughout or text throughout."""
        start = self._left.lstrip()
        if not is_last and PYTHON_TAG.startswith(start):
            return False
        if start.removeprefix(PYTHON_TAG).lstrip().startswith("{"):
            self._left = start.removeprefix(PYTHON_TAG)
            self._state = self._head
        else:
            self._state = self._say
        return True

    def _say(self, is_last: bool) -> bool:
        """Read text, up to the next tag."""
        tag = self._form.tag
        at = self._left.find(tag) if tag else -1
        if at < 0:
            held = 0 if is_last else _overlap(self._left, tag)
            if self.calls and not self._left[: len(self._left) - held].strip():
                return False  # space between calls and behind them is layout
            self._read.text += self._left[: len(self._left) - held]
            self._left = self._left[len(self._left) - held :]
            return False
        before, self._left = self._left[:at], self._left[at + len(tag) :]
        self._read.text += before if before.strip() else ""
        self._before = tag
        self._state = self._head_of_list if self._form.is_list else self._head
        return True

    def _head_of_list(self, is_last: bool) -> bool:
        start = self._left.lstrip()
        if not start and not is_last:
            return False
        left = start.removeprefix("[")
        self._before += self._left[: len(self._left) - len(left)]
        self._left = left
        self._state = self._head
        return True

    def _head(self, is_last: bool) -> bool:
        """Read the name of the function that is called."""
        match = _HEAD.match(self._left)
        name = None if match is None else _text_of(match[1])
        if match is not None and self._is_known(name):
            self._open(name)
            self._left = self._left[match.end() :]
            self._braces = _Braces()
            self._state = self._arguments
            return True
        close = self._form.close
        end = self._left.find(close) if close else _end_of_json(self._left)
        if end < 0 and not is_last:
            return False
        body = self._left if end < 0 else self._left[:end]
        self._left = "" if end < 0 else self._left[end + len(close) :]
        if self._take_whole(body):
            self._state = self._drop if self._only_one else self._say if close else self._next
        else:
            self._read.text += self._before + body + (close if end >= 0 else "")
            self._state = self._say
        return bool(self._left)

    def _is_known(self, name: object) -> TypeGuard[str]:
        """Return whether this can be the name of a function that is called."""
        return isinstance(name, str) and (bool(self._form.tag) or not self._names or name in self._names)

    def _take_whole(self, body: str) -> bool:
        """Read a call whose parts stand in another order."""
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            return False
        if not isinstance(said, dict) or not {"arguments", "parameters"} & set(said):
            return False
        name, given = said.get("name"), said.get("arguments", said.get("parameters"))
        if not self._is_known(name):
            return False
        self._open(name)
        self._argue(given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))
        return True

    def _arguments(self, is_last: bool) -> bool:
        """Read the arguments, up to the brace that ends them."""
        end = self._braces.end(self._left)
        if end >= 0:
            self._state = self._drop if self._only_one else self._tail
        stop = len(self._left) if end < 0 else end
        self._argue(self._left[:stop])
        self._left = self._left[stop:]
        return end >= 0

    def _tail(self, is_last: bool) -> bool:
        """Read the rest of a call after its arguments: other keys, its brace, and what closes it.

        What closes it may be missing before another call, and at the end of an answer, where text may follow instead.
        """
        end = _end_of_call(self._left)
        if end < 0 and not is_last:
            return False
        rest, close = self._left[max(end, 0) :], self._form.close
        if not close:
            self._left, self._state = rest, self._next
            return bool(rest)
        at, tag = rest.find(close), rest.find(self._form.tag)
        if at < 0 and tag < 0 and not is_last:
            return False
        is_closed = at >= 0 and (tag < 0 or at < tag)
        self._left, self._state = rest[at + len(close) :] if is_closed else rest, self._say
        return True

    def _next(self, is_last: bool) -> bool:
        """Read the beginning of another call, or the end of all calls."""
        start = self._left.lstrip()
        if not start:
            return False
        goes_on = start[0] in ",;"
        self._before = start[0]
        self._left = start[1:] if goes_on or (self._form.is_list and start[0] == "]") else start
        self._state = self._head if goes_on else self._say
        return True

    def _drop(self, is_last: bool) -> bool:
        """Drop everything after a call that has to be the only one."""
        self._left = ""
        return False

    def _open(self, name: str) -> None:
        self._before = ""
        call = ToolCall(f"call_{uuid.uuid4().hex[:24]}", name)
        self._read.deltas.append({"index": len(self.calls), **call.whole})
        self.calls.append(call)

    def _argue(self, text: str) -> None:
        if text:
            self.calls[-1].arguments += text
            self._read.deltas.append({"index": len(self.calls) - 1, "function": {"arguments": text}})


def _overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of the tag."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-size:])), 0)


def _end_of_json(text: str) -> int:
    """Return where the JSON at the beginning of a text ends; -1 while it does not."""
    start = len(text) - len(text.lstrip())
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return -1


def _text_of(written: str) -> str | None:
    """Return the text that a JSON string spells, None where it is none."""
    try:
        return str(json.loads(written))
    except ValueError:
        return None


def _end_of_call(text: str) -> int:
    """Return where the object ends whose arguments have just ended; -1 while it does not, 0 where it has no brace."""
    start = text.lstrip()
    if not start:
        return -1
    return _Braces(1).end(text) if start[0] in ",}" else 0
