"""Turning public task data into prompt files.

Three tasks: *e2e*, a meaning representation to be put into words (Novikova et al. 2017, arXiv 1706.09254);
*wikisql*, a question to be put into SQL over one table (Zhong et al. 2017, arXiv 1709.00103); and *advising*,
questions about courses, all over one database of many tables (Finegan-Dollak et al. 2018, arXiv 1806.09029). Its
queries are long. Its schema is the same for every question, so it is learnt and not part of the prompt.

The source is JSONL, plain or ``.gz``, with the fields ``mr``, ``ref`` (e2e), ``question``, ``columns_seen``, ``sql``
(wikisql) or ``question``, ``sql`` (advising).

A *train* file has one row per reference; any other split one row per distinct prompt, with all its references.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vivace.errors import ConfigError, CorruptError, NotFoundError, nearest
from vivace.evaluate.slots import slot_errors
from vivace.evaluate.spacing import detokenise, is_tokenised
from vivace.files import UNREADABLE
from vivace.prompts import Prompt, save_prompts

SPLITS = ("train", "dev")

Row = Mapping[str, object]


@dataclass(frozen=True)
class Task:
    """How a row of a public file becomes a prompt and its answer."""

    name: str
    prompt: Callable[[Row], str]
    answer: Callable[[Row], str]
    file: str = "{split}"
    """Name of the public file in a folder, without its ending."""


@dataclass(frozen=True)
class Converted:
    """The file that `convert` wrote for one split."""

    source: Path
    output: Path
    num_rows: int
    num_references: int
    was_detokenised: bool


def describe_prompt(mr: str) -> str:
    """Return the prompt of the e2e task for a meaning representation."""
    return f"Describe: {mr}"


def sql_prompt(question: str, columns: Iterable[str]) -> str:
    """Return the prompt of the wikisql task for a question over a table with these columns."""
    return f"Write SQL for: {question} Columns: {', '.join(columns)}"


def advising_prompt(question: str) -> str:
    """Return the prompt of the advising task for a question."""
    return f"Write SQL for: {question} Database: advising"


def _text(row: Row, key: str) -> str:
    """Return a text field of a row.

    Raises:
        ValueError: it is missing or not text.
    """
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"field {key!r} is missing or not text")
    return " ".join(value.split())


def _columns(row: Row) -> list[str]:
    """Return the columns of a row.

    Raises:
        ValueError: they are missing or not a list of names.
    """
    value = row.get("columns_seen")
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("field 'columns_seen' is missing or not a list of names")
    return value


TASKS: Mapping[str, Task] = {
    "e2e": Task("e2e", lambda row: describe_prompt(_text(row, "mr")), lambda row: _text(row, "ref")),
    "wikisql": Task(
        "wikisql", lambda row: sql_prompt(_text(row, "question"), _columns(row)), lambda row: _text(row, "sql")
    ),
    "advising": Task(
        "advising",
        lambda row: advising_prompt(_text(row, "question")),
        lambda row: _text(row, "sql"),
        file="advising_{split}",
    ),
}
"""All tasks by name."""


def convert(
    task: str, source: str | Path, output: str | Path, *, split: str | None = None, complete: bool = False
) -> list[Converted]:
    """Write the prompt files of a task.

    Args:
        task: a key of `TASKS`.
        source: a public file, or a folder that holds ``train.jsonl[.gz]`` and ``dev.jsonl[.gz]``
            (``advising_train.jsonl[.gz]`` and so on), itself or in a subfolder named after the task.
        output: a folder, filled with ``<task>-<split>.jsonl``, or the ``.jsonl`` file to write.
        split: the only split to convert; needed for a file whose name contains neither ``train`` nor ``dev``.
        complete: whether to leave out train references of e2e that omit, add or get wrong a slot
            (``evaluate/slots.py``).

    Returns:
        One entry for each file written, in the order of `SPLITS`.

    Raises:
        ConfigError: the task or split is unknown, there are several files for one output, the output is the source, or
            ``complete`` is given for a task without slots.
        NotFoundError: there is no such source.
        CorruptError: a row lacks what the task needs; then nothing is written.
    """
    if task not in TASKS:
        raise ConfigError(f"no task {task!r}{nearest(task, TASKS)}")
    if split is not None and split not in SPLITS:
        raise ConfigError(f"no split {split!r}{nearest(split, SPLITS)}")
    if complete and task != "e2e":
        raise ConfigError(f"only e2e has slots that an answer could leave out; {task} has no complete references")
    sources = _find(task, Path(source), split)
    target = Path(output)
    if target.suffix == ".jsonl" and len(sources) > 1:
        raise ConfigError(
            f"{source} has {len(sources)} splits but {target} is one file; name a folder, or give --split"
        )
    if target.resolve() in [path.resolve() for path in sources.values()]:
        raise ConfigError(f"{target} is the source itself; name another file")
    rows = {name: list(_pairs(TASKS[task], path)) for name, path in sources.items()}
    done = []
    for name, path in sources.items():
        file = target if target.suffix == ".jsonl" else target / f"{task}-{name}.jsonl"
        done.append(_convert_file(TASKS[task], rows[name], path, file, is_train=name == "train", complete=complete))
    return done


def _find(task: str, source: Path, split: str | None) -> dict[str, Path]:
    """Return the file of each split."""
    wanted = SPLITS if split is None else (split,)
    if source.is_file():
        named = [name for name in SPLITS if name in source.name.lower()]
        if split is None and len(named) != 1:
            raise ConfigError(f"{source} does not say which split it is; give --split train or --split dev")
        return {split or named[0]: source}
    stems = {name: TASKS[task].file.format(split=name) for name in wanted}
    folders = (source, source / task)
    names = {name: [f / f"{stem}.jsonl{end}" for f in folders for end in (".gz", "")] for name, stem in stems.items()}
    found = {name: path for name, paths in names.items() for path in paths[::-1] if path.is_file()}
    missing = [name for name in wanted if name not in found]
    if not found or (split is not None and missing):
        raise NotFoundError(
            f"no {' or '.join(f'{stems[name]}.jsonl[.gz]' for name in missing)} in {source} or {source / task}"
        )
    return found


def _convert_file(
    task: Task, pairs: list[tuple[str, str]], source: Path, output: Path, *, is_train: bool, complete: bool
) -> Converted:
    """Convert the rows of one file."""
    was_tokenised = is_tokenised(answer for _, answer in pairs) and task.name == "e2e"
    if was_tokenised:
        pairs = [(detokenise(prompt), detokenise(answer)) for prompt, answer in pairs]
    if is_train and complete:
        pairs = [pair for pair in pairs if not _errors(*pair)]
    if is_train:
        prompts = [Prompt(prompt, (answer,), task.name) for prompt, answer in pairs]
    else:
        answers: dict[str, list[str]] = {}
        for prompt, answer in pairs:
            answers.setdefault(prompt, []).append(answer)
        prompts = [Prompt(prompt, tuple(references), task.name) for prompt, references in answers.items()]
    num_rows = save_prompts(output, prompts)
    return Converted(source, output, num_rows, len(pairs), was_tokenised)


def _errors(prompt: str, answer: str) -> int:
    """Count the slots that the answer omits, gets wrong or adds."""
    found = slot_errors(prompt, answer)
    return found.num_wrong + found.num_missing + found.num_added


def _pairs(task: Task, source: Path) -> Iterator[tuple[str, str]]:
    """Yield the prompt and the answer of each row."""
    opener = gzip.open if source.suffix == ".gz" else open
    number = 0
    try:
        with opener(source, "rt", encoding="utf-8") as stream:
            for line in stream:
                number += 1
                row = json.loads(line)
                yield task.prompt(row), task.answer(row)
    except UNREADABLE as error:
        raise CorruptError(f"{source}: not readable as UTF-8 text ({error})") from error
    except (ValueError, AttributeError) as error:
        raise CorruptError(f"{source}, line {number}: not a row of {task.name} ({error})") from error
    if number == 0:
        raise CorruptError(f"{source}: no rows")
