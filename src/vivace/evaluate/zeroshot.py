"""Tasks that are judged by likelihood, without an example: public files of choices and continuations, and plain text.

A row of a task file has one of three forms:

* ``{"task", "contexts": [c], "options": [o, ...], "gold"}``: which option goes on from the context;
* ``{"task", "contexts": [c, ...], "options": [o], "gold"}``: from which context the option goes on (Winograd schemas,
  where a pronoun is replaced by each of the things it may stand for);
* ``{"task", "contexts": [c], "options": [o]}``: whether the model would write the option (LAMBADA);
* ``{"task", "text"}``: how well it predicts a text.

Public files come with the fields ``query``, ``choices``, ``gold``, or ``context_options``, ``continuation``, ``gold``,
or ``context``, ``continuation``. A query that asks ("Question: ...") is followed by "Answer:" on a line of its own
where it does not say so itself, and options begin with a space, as they do in running text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vivace.configuration import build
from vivace.errors import ConfigError, CorruptError, NotFoundError
from vivace.files import UNREADABLE, unpacked, write_text

WIKITEXT, ZEROSHOT = "wikitext", "zeroshot"
JUDGED_TASKS = (ZEROSHOT, WIKITEXT)
"""Kinds of public files that become task files."""

ARTICLE = re.compile(r"^(?= = [^=\n]+ = $)", re.MULTILINE)
"""Where an article of WikiText begins: at its title, which has one sign on either side; a row for each article."""


@dataclass(frozen=True)
class TaskRow:
    """One row of a task file."""

    task: str
    contexts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    gold: int | None = None
    """Place of the right option or context; None where there is nothing to choose."""
    text: str | None = None

    def __post_init__(self) -> None:
        if self.text is not None:
            if self.contexts or self.options or not self.text:
                raise ConfigError("a row of text has nothing but that text")
            return
        if not (self.contexts and self.options) or min(len(self.contexts), len(self.options)) > 1:
            raise ConfigError("a row has one context and some options, or some contexts and one option")
        if not all((*self.contexts, *self.options)):
            raise ConfigError("a context or an option is empty")
        if (self.gold is None) != (self.num_choices == 1):
            raise ConfigError("a row says which of several choices is right, and of one nothing")
        if self.gold is not None and not 0 <= self.gold < self.num_choices:
            raise ConfigError(f"gold is {self.gold}; the choices are 0 to {self.num_choices - 1}")

    @property
    def num_choices(self) -> int:
        """Number of contexts or options to choose from."""
        return max(len(self.contexts), len(self.options))


@dataclass(frozen=True)
class ConvertedTask:
    """What became of a public file."""

    source: Path
    output: Path | None
    """None for a file without options, which likelihoods cannot judge."""
    num_rows: int


def convert_task(task: str, source: Path, output: Path) -> list[ConvertedTask]:
    """Write the task file of a public file, or of each in a folder.

    Args:
        task: "zeroshot" or "wikitext".
        source: a ``.jsonl[.gz]`` file (zeroshot), a ``.txt[.gz]`` file (wikitext), or a folder of them.
        output: a folder, filled with a file for each task, or the ``.jsonl`` file to write.

    Raises:
        ConfigError: one file is named for several tasks, or the source itself.
        NotFoundError: there is no such source.
        CorruptError: a row is none; then nothing is written.
    """
    ends = (".jsonl", ".jsonl.gz") if task == ZEROSHOT else (".txt", ".txt.gz")
    files = [source] if source.is_file() else sorted(path for path in source.glob("*") if path.name.endswith(ends))
    files = [path for path in files if not path.name.startswith("LICENSE")]
    if not files:
        raise NotFoundError(f"no {' or '.join(f'*{end}' for end in ends)} at {source}")
    if output.suffix == ".jsonl" and len(files) > 1:
        raise ConfigError(f"{source} has {len(files)} files and {output} is one; name a folder")
    found = [(path, _read_public(task, path)) for path in files]
    done = []
    for path, rows in found:
        target = output if output.suffix == ".jsonl" else output / f"{_stem(path)}.jsonl"
        if target.resolve() == path.resolve():
            raise ConfigError(f"{target} is the source itself; name another file")
        if rows:
            save_task(target, rows)
        done.append(ConvertedTask(path, target if rows else None, len(rows)))
    if not any(each.num_rows for each in done):
        raise CorruptError(f"{source}: no row has options to choose from; such tasks are answered in words")
    return done


def save_task(path: Path, rows: Iterable[TaskRow]) -> None:
    """Write a task file, all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{key: value for key, value in asdict(row).items() if value is not None and value != ()} for row in rows]
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def load_task(path: Path, limit: int | None = None) -> list[TaskRow]:
    """Read the first ``limit`` rows of a task file.

    Raises:
        NotFoundError: there is no such file.
        CorruptError: it is not a task file.
    """
    rows = []
    for number, raw in enumerate(_json_rows(path)[:limit], 1):
        try:
            if "task" not in raw:
                raise ConfigError("it names no task")
            rows.append(build(TaskRow, raw))
        except ConfigError as error:
            hint = "vivace data zeroshot writes task files"
            raise CorruptError(f"{path}, line {number}: not a row of a task ({error}); {hint}") from error
    return rows


def _read_public(task: str, path: Path) -> list[TaskRow]:
    """Return the rows of a public file; none where they have no options."""
    name = _stem(path)
    if task == WIKITEXT:
        return [TaskRow(name, text=article) for article in ARTICLE.split(_text_of(path)) if article.strip()]
    found = []
    for number, row in enumerate(_json_rows(path), 1):
        try:
            made = _row(name, row)
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
            raise CorruptError(f"{path}, line {number}: not a row of choices ({error})") from error
        if made is not None:
            found.append(made)
    return found


def _row(name: str, row: Mapping[str, Any]) -> TaskRow | None:
    """Return a row of a public file as a row of a task; None for one that has to be answered in words."""
    if "choices" in row:
        return TaskRow(name, (_asked(row["query"]),), _spaced(row["choices"]), int(row["gold"]))
    if "context_options" in row:
        contexts = tuple(context.rstrip() for context in _listed(row["context_options"]))
        return TaskRow(name, contexts, _spaced([row["continuation"]]), int(row["gold"]))
    if "continuation" in row:
        return TaskRow(name, (row["context"].rstrip(),), _spaced([row["continuation"]]))
    return None


def _asked(query: str) -> str:
    """Return a query that says where its answer goes."""
    text = query.rstrip()
    last = text.rsplit("\n", 1)[-1]
    return f"{text}\nAnswer:" if last.startswith("Question:") else text


def _spaced(options: Sequence[str]) -> tuple[str, ...]:
    return tuple(f" {option.strip()}" for option in _listed(options))


def _listed(options: Sequence[str]) -> Sequence[str]:
    """Return options as they are; a text alone would be taken for a list of its characters."""
    if not isinstance(options, list):
        raise TypeError(f"options are a list of texts, found {type(options).__name__}")
    return options


def _stem(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    return name.removesuffix(".jsonl").removesuffix(".txt")


def _text_of(path: Path) -> str:
    """Return the content of a file, unpacked where it is packed.

    Raises:
        NotFoundError: there is none.
        CorruptError: it is no text.
    """
    if not path.is_file():
        raise NotFoundError(f"there is no file {path}")
    try:
        return unpacked(path).decode("utf-8")
    except (ValueError, *UNREADABLE) as error:
        raise CorruptError(f"{path}: not readable as UTF-8 text ({error})") from error


def _json_rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file."""
    rows: list[dict[str, Any]] = []
    try:
        for line in _text_of(path).rstrip("\n").split("\n"):  # other line ends may stand inside a text
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
            rows.append(row)
    except (ValueError, RecursionError) as error:  # the latter of brackets within brackets without end
        raise CorruptError(f"{path}, line {len(rows) + 1}: not JSON, one object a line ({error})") from error
    if not rows:
        raise CorruptError(f"{path}: no rows")
    return rows
