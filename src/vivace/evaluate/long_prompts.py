"""Long prompts from public files: questions about one of many documents, keys of a long list, texts to be read.

Three tasks. *multidoc*: a question, and documents of which one has the answer; the file has that document with each
question, and documents of other questions stand beside it (as in Liu et al. 2023, *Lost in the middle*,
arXiv:2307.03172, which retrieves its distractors). *kv*: a JSON object of random keys and values, and a key whose value
is asked for (same paper). *reading*: a text with a question and its answer, as it is.

The source is JSONL, plain or ``.gz``, with the fields ``question``, ``answers``, ``ctxs`` (multidoc),
``ordered_kv_records``, ``key``, ``value`` (kv), or ``context``, ``answer`` and perhaps ``aliases`` (reading).

Every fifth row of a source is of its *dev* split, the others are of *train*; documents of other questions are taken
from the same split. So what is learnt or chosen on one split was never seen in the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from vivace.errors import ConfigError, CorruptError, NotFoundError
from vivace.evaluate.tasks import SPLITS, Converted
from vivace.files import UNREADABLE, unpacked
from vivace.prompts import Prompt, save_prompts

DEV_EVERY = 5
"""One row in so many is of the split *dev*."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Layout:
    """How prompts are put together."""

    documents: int = 20
    """Documents or keys of a prompt: multidoc takes so many, and kv cuts longer lists."""
    position: int | None = None
    """Place of the one that is asked for, from 1; None draws it."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.documents < 1:
            raise ConfigError(f"--documents must be at least 1, found {self.documents}")
        if self.position is not None and not 1 <= self.position <= self.documents:
            raise ConfigError(f"--position is {self.position}; there are {self.documents} documents, from 1")


def _multidoc(rows: Sequence[Row], number: int, layout: Layout, draws: Random) -> Prompt:
    """Return a question about one of many documents."""
    if len(rows) < layout.documents:
        raise ConfigError(f"{layout.documents} documents, and there are {len(rows)} in this split; ask for fewer")
    others = draws.sample([place for place in range(len(rows)) if place != number], layout.documents - 1)
    documents = [rows[place]["ctxs"][0] for place in others]
    documents.insert(_place(layout, draws), rows[number]["ctxs"][0])
    return about_documents(documents, rows[number])


def about_documents(documents: Sequence[Mapping[str, str]], row: Row) -> Prompt:
    """Return the question of a row about documents, of which one is its own."""
    listed = [f"Document {at} ({each['title']}): {each['text']}" for at, each in enumerate(documents, 1)]
    text = "\n".join(["Here are some documents.", *listed, "", question_of(row)])
    return Prompt(text, tuple(row["answers"]), "multidoc")


def question_of(row: Row) -> str:
    """Return how a row asks about documents that stand before it."""
    return f"Question: {row['question']}?\nAnswer the question in a few words, from the documents."


def _kv(rows: Sequence[Row], number: int, layout: Layout, draws: Random) -> Prompt:
    """Return a list of keys and values, and one of the keys."""
    row = rows[number]
    wanted = [row["key"], row["value"]]
    others = [pair for pair in row["ordered_kv_records"] if pair[0] != row["key"]][: layout.documents - 1]
    others.insert(min(_place(layout, draws), len(others)), wanted)
    return Prompt(about_keys(others, row["key"]), (row["value"],), "kv")


def about_keys(pairs: Sequence[Sequence[str]], key: str) -> str:
    """Return the question for the value of a key in a list of keys and values."""
    listed = ",\n".join(f' "{key}": "{value}"' for key, value in pairs)
    return f"Extract the value that belongs to a key in this JSON object.\n\n{{{listed}}}\n\n{asked_key(key)}"


def asked_key(key: str) -> str:
    """Return how a key is asked for in a list that stands before it."""
    return f'Key: "{key}"\nAnswer with the value.'


def _reading(rows: Sequence[Row], number: int, layout: Layout, draws: Random) -> Prompt:
    """Return a text as it is."""
    row = rows[number]
    return Prompt(row["context"], (row["answer"], *row.get("aliases", ())), "reading")


def _place(layout: Layout, draws: Random) -> int:
    """Return the place of what is asked for, from 0."""
    return draws.randrange(layout.documents) if layout.position is None else layout.position - 1


LONG_TASKS: Mapping[str, Callable[[Sequence[Row], int, Layout, Random], Prompt]] = {
    "multidoc": _multidoc,
    "kv": _kv,
    "reading": _reading,
}
"""Makes the prompt of a row, by task."""


def convert_long(task: str, source: Path, output: Path, layout: Layout, split: str | None = None) -> list[Converted]:
    """Write prompt files of long prompts.

    Args:
        task: a key of ``LONG_TASKS``.
        source: a public file.
        output: a folder, filled with ``<task>-<split>.jsonl``, or the ``.jsonl`` file to write one split to.
        layout: how prompts are put together.
        split: the only split to write.

    Raises:
        ConfigError: the split is unknown, one file is named for two splits, or there are too few documents.
        NotFoundError: there is no such source.
        CorruptError: a row lacks what the task needs; then nothing is written.
    """
    if split is not None and split not in SPLITS:
        raise ConfigError(f"no split {split!r}; choose train or dev")
    if output.resolve() == source.resolve():
        raise ConfigError(f"{output} is the source itself; name another file")
    if output.suffix == ".jsonl" and split is None:
        raise ConfigError(f"{output} is one file, and there are two splits; name a folder, or give --split")
    rows = read_rows(source)
    done = []
    for name in SPLITS if split is None else (split,):
        own = [row for place, row in enumerate(rows) if (place % DEV_EVERY == 0) == (name == "dev")]
        draws = Random(layout.seed)
        try:
            prompts = [LONG_TASKS[task](own, place, layout, draws) for place in range(len(own))]
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise CorruptError(f"{source}: a row is not one of {task} ({type(error).__name__}: {error})") from error
        done.append((output if output.suffix == ".jsonl" else output / f"{task}-{name}.jsonl", prompts))
    return [
        Converted(source, path, save_prompts(path, prompts), sum(len(p.references) for p in prompts), False)
        for path, prompts in done
    ]


def read_rows(source: Path) -> list[Row]:
    """Read a file.

    Raises:
        NotFoundError: there is none.
        CorruptError: it is not JSONL, or empty.
    """
    if not source.is_file():
        raise NotFoundError(f"{source}: no such file")
    try:
        rows = [json.loads(line) for line in unpacked(source).decode("utf-8").split("\n") if line.strip()]
    except (ValueError, *UNREADABLE) as error:
        raise CorruptError(f"{source}: not readable as JSON, one object a line ({error})") from error
    if not rows:
        raise CorruptError(f"{source}: no rows")
    return rows
