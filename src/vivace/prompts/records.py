"""The rows of prompt files, and reading and writing such files.

A row is ``{"prompt": str}``, ``{"prompt": [int, ...]}`` (token ids, for a checkpoint without tokenizer) or
``{"messages": [{"role": str, "content": str}, ...]}``, with optional
``"reference"`` (a string, or a list if several answers are right) and ``"task"`` (which metrics apply).
Other keys are ignored, unless one looks like a misspelling of these.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vivace.errors import ConfigError, CorruptError, NotFoundError, nearest
from vivace.files import UNREADABLE, write_text

Message = dict[str, str]
"""One turn of a conversation: ``{"role": ..., "content": ...}``."""

Asked = str | list[Message] | list[int]
"""A text, a conversation or token ids, as ``engine.generate`` takes them."""

PACKAGED: Mapping[str, str] = {
    "e2e": "100 meaning representations to describe",
    "sql": "100 questions to answer in SQL",
    "chat": "24 questions and small tasks for a chat model, without references",
}
"""Prompt sets that come with the package, with a description of each."""

TASKS = ("e2e", "sql")
"""Those that the model that ships was trained for."""

_KEYS = ("prompt", "messages", "reference", "task")


@dataclass(frozen=True)
class Prompt:
    """A prompt and, if known, the answers that are right."""

    request: Asked
    """What is to be answered."""
    references: tuple[str, ...] = ()
    """Right answers."""
    task: str | None = None
    """Name of the task, which determines the metrics."""


def load_prompts(
    path: str | Path, *, check: Callable[[Prompt], None] | None = None, settings: Collection[str] = ()
) -> list[Prompt]:
    """Return the rows of a prompt file (JSONL, plain or ``.gz``), in order.

    Args:
        path: the file.
        check: raises ``ValueError`` for a prompt that the caller cannot use.
        settings: keys that the caller takes for the whole file, and that no row may have for itself.

    Raises:
        NotFoundError: there is no such file.
        ConfigError: a row is not a prompt; the message names file, line and what is wrong with it.
        CorruptError: the file cannot be read as text, or has no rows.
    """
    source = Path(path)
    if not source.is_file():
        raise NotFoundError(f"prompt file {source}: no such file; a prompt file holds one JSON object a line")
    opener = gzip.open if source.suffix == ".gz" else open
    try:
        with opener(source, "rt", encoding="utf-8-sig") as stream:
            lines = stream.read().split("\n")  # not at U+2028 and the like, which may stand in a text
    except UNREADABLE as error:
        raise CorruptError(f"prompt file {source}: not readable as UTF-8 text ({error})") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(_parse(line, settings))
                if check is not None:
                    check(prompts[-1])
            except ValueError as error:
                raise ConfigError(f"{source}, line {number}: {error}") from error
    if not prompts:
        raise CorruptError(
            f'prompt file {source}: no rows; expected one JSON object a line, such as {{"prompt": "Hi"}}'
        )
    return prompts


def load_text(path: str | Path) -> str:
    """Return a file of plain text.

    Raises:
        NotFoundError: there is no such file.
        CorruptError: it is not UTF-8 text.
    """
    source = Path(path)
    if not source.is_file():
        raise NotFoundError(f"{source}: no such file")
    try:
        return source.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorruptError(f"{source} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogates. Python reads bytes that are not UTF-8 as such on the command line,
    and JSON can spell them; no tokenizer takes them.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def save_prompts(path: str | Path, prompts: Iterable[Prompt]) -> int:
    """Write a prompt file completely, or leave the previous one as it was.

    A single reference is written as a string, several as a list.

    Returns:
        Number of rows.

    Raises:
        OSError: the file cannot be written.
    """
    lines = [json.dumps(_row(prompt), ensure_ascii=False) for prompt in prompts]
    write_text(path, "".join(line + "\n" for line in lines))
    return len(lines)


def packaged_prompts(name: str) -> list[Prompt]:
    """Return the prompts of a set that comes with the package.

    Args:
        name: a key of `PACKAGED`.

    Raises:
        ConfigError: there is no such set.
    """
    if name not in PACKAGED:
        raise ConfigError(f"no packaged prompt set {name!r}{nearest(name, PACKAGED)}")
    return load_prompts(Path(__file__).with_name(f"{name}.jsonl"))


def _row(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as a JSON object."""
    is_conversation = not isinstance(prompt.request, str) and isinstance(prompt.request[0], dict)
    row: dict[str, Any] = {"messages" if is_conversation else "prompt": prompt.request}
    if prompt.references:
        row["reference"] = prompt.references[0] if len(prompt.references) == 1 else list(prompt.references)
    if prompt.task is not None:
        row["task"] = prompt.task
    return row


def _parse(line: str, settings: Collection[str]) -> Prompt:
    """Read one line of a prompt file, in which none of ``settings`` may stand.

    Raises:
        ValueError: it is not a prompt.
    """
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read (lists or objects lie too deep within one another)") from error
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {_kind(row)}")
    for key in row:
        close = get_close_matches(key, _KEYS, n=1, cutoff=0.8)
        if key not in _KEYS and close:
            raise ValueError(f"unknown key {key!r}; did you mean {close[0]!r}?")
    if own := [key for key in row if key in settings]:
        raise ValueError(f"{own[0]!r} is a setting of the whole file, and a row cannot have its own; leave it out")
    task = row.get("task")
    if task is not None and not isinstance(task, str):
        raise ValueError(f'"task" is a string, found {_kind(task)}')
    return Prompt(_request(row), _references(row.get("reference")), task)


def _request(row: dict[str, Any]) -> Asked:
    """Return the prompt or the messages of a row, checked."""
    if ("prompt" in row) == ("messages" in row):
        found = "both" if "prompt" in row else "neither"
        raise ValueError(f'expected "prompt" or "messages", found {found}')
    if "prompt" in row:
        prompt = row["prompt"]
        if isinstance(prompt, list) and prompt and all(type(each) is int and each >= 0 for each in prompt):
            return prompt
        if not isinstance(prompt, str):
            raise ValueError(f'"prompt" is a string or a list of token ids, found {_kind(prompt)}')
        if not prompt.strip():
            raise ValueError('"prompt" is empty')
        return prompt
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'"messages" is a list of at least one turn, found {_kind(messages)}')
    for index, turn in enumerate(messages):
        is_turn = isinstance(turn, dict) and set(turn) == {"role", "content"}
        if not is_turn or not all(isinstance(value, str) for value in turn.values()):
            raise ValueError(f'"messages"[{index}] is {{"role": str, "content": str}}, found {_kind(turn)}')
    return [dict(turn) for turn in messages]


def _references(value: Any) -> tuple[str, ...]:
    """Return the reference answers of a row, checked."""
    references = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(references, list) or not all(isinstance(item, str) for item in references):
        raise ValueError(f'"reference" is a string or a list of strings, found {_kind(value)}')
    return tuple(references)


def _kind(value: Any) -> str:
    """Describe the type of a value in the terms of JSON."""
    if isinstance(value, dict):
        return f"an object with {', '.join(map(repr, value)) or 'no keys'}"
    if isinstance(value, list):
        kinds = sorted({_kind(item).split()[-1] for item in value})
        return f"a list of {' and '.join(kinds)}" if kinds else "an empty list"
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}
    return names[type(value)]
