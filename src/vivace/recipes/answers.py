"""Answers that another training has had written, to be learnt from as they are (``vivace train --answers FILE``).

Text of a model's own (``own_text.py``) takes longer to write than many drafters take to learn, and drafters that are
compared have to learn from the same text. The file is read and never changed, unlike the file of a run's own text:
it may be another run's, which may still be writing. A last line without an end is therefore left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vivace.errors import ConfigError, CorruptError, MismatchError, NotFoundError
from vivace.files import whole_lines
from vivace.recipes.reading import override
from vivace.train.data import Unended, read_prompt
from vivace.train.variation import Pair

WRITTEN_BY = "own_tokens", "own_minutes", "regenerate"
"""Keys of recipes that ask for text; none of them has an effect beside a file of answers."""
MODEL_DIGITS = 16
"""Number of hexadecimal digits of ``base_hash`` that a row names its model by."""


def pair_of(row: Mapping[str, Any]) -> Pair:
    """Return prompt and answer of a row, the answer marked where it was cut before its end."""
    answer = row["reference"]
    return read_prompt(row), answer if row.get("ended", True) else Unended(answer)


@dataclass(frozen=True)
class AnswersFile:
    """Rows of a file of answers."""

    path: Path
    """The file."""
    pairs: tuple[Pair, ...]
    """Prompts and answers, in the order of the file."""
    num_tokens: int
    """Number of tokens of all answers."""
    digest: str
    """SHA-256 of the rows, 16 hexadecimal digits; a resumed training must have the same."""

    def part(self, first: int, every: int) -> AnswersFile:
        """Return the rows ``first``, ``first + every`` and so on; the digest stays the file's."""
        return replace(self, pairs=self.pairs[first::every])


def without_writing(values: Mapping[str, Any], changes: Sequence[str], *, has_data: bool) -> dict[str, Any]:
    """Return the values of a recipe that learns from a file of answers, whatever text it would have had written.

    Args:
        values: the recipe with its changes.
        changes: changes of the user's, which may not ask for text.
        has_data: whether prompts are given, too.

    Raises:
        ConfigError: other text is asked for.
    """
    if has_data:
        raise ConfigError("--answers is all the text that is learnt from; leave out --data, or --answers")
    if asked := [key for key in WRITTEN_BY if key in override({}, changes)]:
        raise ConfigError(f"--answers has the model's own text already; leave out {asked[0]}, or --answers")
    return {key: value for key, value in values.items() if key not in WRITTEN_BY}


def read_answers(path: Path, base: str) -> AnswersFile:
    """Read a file that a training wrote as ``OUT/run/own.jsonl``.

    Args:
        path: the file.
        base: ``base_hash`` of the model that learns.

    Raises:
        NotFoundError: there is no such file.
        ConfigError: it has no answers.
        CorruptError: a line is no answer.
        MismatchError: the answers are another model's.
    """
    try:
        whole = whole_lines(path)
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not text"
        raise NotFoundError(f"cannot read the answers {path}: {reason}") from exc
    rows = [_row(line, f"{path}, line {number}") for number, line in enumerate(whole.split("\n")[:-1], 1)]
    if not rows:
        raise ConfigError(f"{path} has no answers to learn from")
    model = base[:MODEL_DIGITS]
    if strange := {row["model"] for row in rows} - {model}:
        raise MismatchError(f"{path} has answers of another model ({min(strange)}, this one is {model})")
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return AnswersFile(path, tuple(map(pair_of, rows)), sum(row["tokens"] for row in rows), digest)


def _row(line: str, place: str) -> dict[str, Any]:
    """Return a row of the file with all keys that are read of it."""
    try:
        row = json.loads(line)
    except ValueError as exc:
        raise CorruptError(f"{place} is not JSON: {exc}") from exc
    talks = isinstance(row, dict) and "messages" in row
    kinds = {"messages" if talks else "prompt": list if talks else str, "reference": str, "model": str, "tokens": int}
    missing = [key for key, kind in kinds.items() if not isinstance(row, dict) or not isinstance(row.get(key), kind)]
    if missing:
        raise CorruptError(
            f'{place} has no "{missing[0]}": --answers takes what a training wrote (OUT/run/own.jsonl), --data other '
            "prompt files"
        )
    found: dict[str, Any] = row
    return found
