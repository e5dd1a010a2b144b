"""Turning public sets of instructions and requests into prompt files for chat models.

* ``alpaca`` (Taori et al. 2023) and ``dolly`` (Conover et al. 2023): instructions, with an input or not, and answers.
* ``gsm8k`` (Cobbe et al. 2021, arXiv:2110.14168): questions with worked answers, whose calculator marks ``<<...>>`` are
  left out.
* ``dialogsum`` (Chen et al. 2021, arXiv:2105.06762): dialogues with summaries.
* ``mt_bench`` (Zheng et al. 2023, arXiv:2306.05685): questions of two turns, for measuring only. Where the set has
  reference answers, both turns become a conversation whose last answer is the reference, else the first turn is asked.
* ``snips`` (Coucke et al. 2018, arXiv:1805.10190): requests to an assistant, answered by intent and slots as JSON
  (``frames.py``). A row has ``intent``, and ``data``, the text in pieces, some of which name their ``entity``.
* ``clinc`` (CLINC150; Larson et al. 2019, arXiv:1909.02027): requests of 150 intents, answered by the intent's name.

Rows without an answer, of which alpaca has some, are left out. A source is one file of JSON objects, one a line, plain
or ``.gz``, or a folder with the files under their public names.
A set that has no dev file of its own gives every ``DEV_EVERY``-th row to dev, so that no row is in both.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vivace.errors import ConfigError, CorruptError, NotFoundError, nearest
from vivace.evaluate.frames import write_frame
from vivace.evaluate.tasks import SPLITS, Converted
from vivace.files import UNREADABLE
from vivace.prompts import Prompt, save_prompts

DEV_EVERY = 10
"""Of a set in one file every so many-th row is dev."""
SUMMARIZE = "Summarize this dialogue."
"""What is asked about a dialogue."""
FRAME, INTENT = "Intent and slots as JSON:", "Intent:"
"""What is asked about a request to an assistant."""
_MARKS = re.compile(r"<<[^>]*>>")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTask:
    """How a row of a public instruction set becomes a prompt."""

    prompt: Callable[[Row], Prompt | None]
    """Reads a row; None leaves it out."""
    files: Mapping[str, tuple[str, ...]]
    """Names of public files without ending, by split; ``all`` is divided."""


def _text(row: Row, *names: str) -> str:
    """Return the first of these fields that a row has, as it is written.

    Raises:
        ValueError: it has none, or it is not text.
    """
    name = next((name for name in names if name in row), None)
    if name is None:
        raise ValueError(f"field {names[0]!r} is missing")
    if not isinstance(row[name], str):
        raise ValueError(f"field {name!r} is not text")
    found: str = row[name]
    return found.strip()


def _needed(row: Row, *names: str) -> str:
    if not (found := _text(row, *names)):
        raise ValueError(f"field {names[0]!r} is empty")
    return found


def _instruction(task: str) -> Callable[[Row], Prompt | None]:
    def read(row: Row) -> Prompt | None:
        given = _text(row, "input", "context") if {"input", "context"} & set(row) else ""
        if not (answer := _text(row, "output", "response")):
            return None
        asked = _needed(row, "instruction") + (f"\n\n{given}" if given else "")
        return Prompt(asked, (answer,), task)

    return read


def _question(row: Row) -> Prompt:
    return Prompt(_needed(row, "question"), (_MARKS.sub("", _needed(row, "answer")),), "gsm8k")


def _dialogue(row: Row) -> Prompt:
    names = [name for name in ("summary", "summary1", "summary2", "summary3") if name in row]
    summaries = tuple(dict.fromkeys(_needed(row, name) for name in names or ["summary"]))
    return Prompt(f"{SUMMARIZE}\n\n{_needed(row, 'dialogue')}", summaries, "dialogsum")


def _turns(row: Row) -> Prompt:
    turns, answers = row.get("turns"), row.get("reference")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError("field 'turns' is missing or not a list of texts")
    if not isinstance(answers, list) or len(answers) < len(turns):
        return Prompt(turns[0], (), "mt_bench")
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(answers, turns[1:], strict=False):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    return Prompt(messages, (answers[len(turns) - 1],), "mt_bench")


def _frame(row: Row) -> Prompt:
    pieces = row.get("data")
    if not isinstance(pieces, list) or not all(isinstance(piece, dict) for piece in pieces):
        raise ValueError("field 'data' is missing or not a list of pieces")
    text = " ".join("".join(str(piece.get("text", "")) for piece in pieces).split())
    if not text:
        raise ValueError("field 'data' has no text")
    filled = [(_needed(piece, "entity"), _needed(piece, "text")) for piece in pieces if "entity" in piece]
    return Prompt(f"{FRAME} {text}", (write_frame(_needed(row, "intent"), filled),), "snips")


def _intent(row: Row) -> Prompt:
    return Prompt(f"{INTENT} {_needed(row, 'text')}", (_needed(row, "intent"),), "clinc")


CHAT_TASKS: Mapping[str, ChatTask] = {
    "alpaca": ChatTask(_instruction("alpaca"), {"all": ("alpaca_train", "alpaca_data")}),
    "dolly": ChatTask(_instruction("dolly"), {"all": ("dolly_3k_train", "databricks-dolly-15k")}),
    "gsm8k": ChatTask(_question, {"all": ("train",)}),
    "dialogsum": ChatTask(_dialogue, {"train": ("train", "dialogsum.train"), "dev": ("dev", "dialogsum.dev")}),
    "mt_bench": ChatTask(_turns, {"dev": ("question",)}),
    "snips": ChatTask(_frame, {"all": ("train_full",)}),
    "clinc": ChatTask(_intent, {"train": ("train",), "dev": ("val",)}),
}
"""All sets by name."""


def convert_chat(task: str, source: str | Path, output: str | Path, split: str | None = None) -> list[Converted]:
    """Write the prompt files of an instruction set.

    Args:
        task: a key of `CHAT_TASKS`.
        source: a public file, or a folder that holds the public files, itself or in a subfolder named after the task.
        output: a folder, filled with ``<task>-<split>.jsonl``, or the ``.jsonl`` file to write.
        split: the only split to convert.

    Returns:
        One entry for each file written.

    Raises:
        ConfigError: the task or split is unknown, the set has no such split, or there are several files for one output.
        NotFoundError: there is no such source.
        CorruptError: a row lacks what the task needs; then nothing is written.
    """
    if task not in CHAT_TASKS:
        raise ConfigError(f"no task {task!r}{nearest(task, CHAT_TASKS)}")
    if split is not None and split not in SPLITS:
        raise ConfigError(f"no split {split!r}{nearest(split, SPLITS)}")
    found = _by_split(task, Path(source))
    if split is not None and split not in found:
        raise ConfigError(f"{task} has no split {split}; it has {' and '.join(found)}")
    wanted = {name: rows for name, rows in found.items() if split in (None, name) and rows[1]}
    if split is not None and not wanted:
        raise ConfigError(f"{source} has no rows of the split {split}: every tenth is dev, and there are too few")
    target = Path(output)
    if target.suffix == ".jsonl" and len(wanted) > 1:
        raise ConfigError(
            f"{source} gives {len(wanted)} splits but {target} is one file; name a folder, or give --split"
        )
    if target.resolve() in [path.resolve() for path, _ in wanted.values()]:
        raise ConfigError(f"{target} is the source itself; name another file")
    done = []
    for name, (path, prompts) in wanted.items():
        file = target if target.suffix == ".jsonl" else target / f"{task}-{name}.jsonl"
        references = sum(len(prompt.references) for prompt in prompts)
        done.append(Converted(path, file, save_prompts(file, prompts), references, was_detokenised=False))
    return done


def _by_split(task: str, source: Path) -> dict[str, tuple[Path, list[Prompt]]]:
    """Return the file and the prompts of each split that a source has."""
    known, given = CHAT_TASKS[task], source
    if source.is_file():
        named = [name for name in SPLITS if name in known.files and name in source.name.lower()]
        kinds = named or [name for name in known.files if name in ("all", "dev")]
        files = {kinds[0]: source}
    else:
        files = {}
        for name, stems in known.files.items():
            places = [
                folder / f"{stem}.jsonl{end}"
                for folder in (source, source / task)
                for stem in stems
                for end in ("", ".gz")
            ]
            if (path := next((path for path in places if path.is_file()), None)) is not None:
                files[name] = path
        if not files:
            names = " or ".join(f"{stem}.jsonl[.gz]" for stems in known.files.values() for stem in stems)
            raise NotFoundError(f"no {names} in {given} or {given / task}")
    found = {}
    for name, path in files.items():
        prompts = list(_prompts(task, path))
        if name == "all":
            found["train"] = path, [prompt for place, prompt in enumerate(prompts, 1) if place % DEV_EVERY]
            found["dev"] = path, prompts[DEV_EVERY - 1 :: DEV_EVERY]
        else:
            found[name] = path, prompts
    return found


def _prompts(task: str, path: Path) -> Iterator[Prompt]:
    """Yield the prompt of each row; rows of mt_bench with the reference answers that lie beside them."""
    references: dict[Any, Any] = {}
    beside = [path.with_name(f"reference_gpt4.jsonl{end}") for end in (".gz", "")]
    for file in beside if task == "mt_bench" else ():
        if file.is_file():
            try:
                references |= {row["question_id"]: row["choices"][0]["turns"] for row in _rows(task, file)}
            except (KeyError, IndexError, TypeError) as error:
                raise CorruptError(f"{file}: not reference answers of {task} ({error!r})") from error
    number, found = 0, None
    for row in _rows(task, path):
        number += 1
        try:
            reference = {"reference": references[row["question_id"]]} if row.get("question_id") in references else {}
            found = CHAT_TASKS[task].prompt({**row, **reference})
        except (ValueError, AttributeError, TypeError) as error:
            raise CorruptError(f"{path}, line {number}: not a row of {task} ({error})") from error
        if found is not None:
            yield found
    if number == 0:
        raise CorruptError(f"{path}: no rows")


def _rows(task: str, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file."""
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8") as stream:
            for line in stream:
                number += 1
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("not a JSON object")
                yield row
    except UNREADABLE as error:
        raise CorruptError(f"{path}: not readable as UTF-8 text ({error})") from error
    except ValueError as error:
        raise CorruptError(f"{path}, line {number}: not a row of {task} ({error})") from error
