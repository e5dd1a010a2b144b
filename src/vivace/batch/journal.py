"""The answers of an unfinished run, on disk: what was answered before a stop is not answered again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vivace.errors import BusyError, ConfigError, CorruptError
from vivace.files import lock, whole_lines


class Journal:
    """A file beside the output, to which every answer is appended under the number of its line.

    The first row has the settings, so that a run is continued only with the same ones. A row that was cut off by a kill
    is dropped. An answer counts only if its prompt is still the same, so prompts may be corrected between two runs. The
    file is locked while a run writes it.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        """Open or begin the journal of an output file.

        Raises:
            ConfigError: it was begun with other settings.
            BusyError: another run writes it.
            CorruptError: it is no journal.
        """
        self.path = output.with_name(f".{output.name}.batch")
        self._rows: dict[int, tuple[str, dict[str, Any]]] = {}
        first = json.dumps({"settings": settings}, sort_keys=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        try:
            if not lock(self._file.fileno(), wait=False):
                raise BusyError(f"{self.path} is written by another run; wait for it, or name another output")
            kept = self._read(first)
            self._file.truncate(kept)
            if not kept:
                self._append(first)
        except BaseException:
            self._file.close()
            raise

    def _read(self, first: str) -> int:
        """Read the rows that are whole, and return how many bytes they have."""
        try:
            text = whole_lines(self.path)
            rows = [json.loads(row) for row in text.splitlines()]
            if rows and rows[0] != json.loads(first):
                if len(rows) == 1:  # nothing was answered, so nothing is lost
                    return 0
                raise ConfigError(
                    f"{self.path} was begun with other settings, or by another model; repeat them, or delete it to "
                    "begin again"
                )
            self._rows = {row["line"]: (row["prompt"], row["answer"]) for row in rows[1:]}
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptError(f"{self.path} is no journal of vivace batch; delete it to begin again") from error
        return len(text.encode())

    def _append(self, row: str) -> None:
        self._file.write(row.encode() + b"\n")
        self._file.flush()

    def answer(self, line: int, prompt: object) -> dict[str, Any] | None:
        """Return the answer to the prompt of a line, None where there is none yet."""
        known = self._rows.get(line)
        return known[1] if known is not None and known[0] == digest(prompt) else None

    def add(self, line: int, prompt: object, answer: dict[str, Any]) -> None:
        """Append an answer; it is read again if the process is killed at any time after this."""
        own = digest(prompt)
        self._rows[line] = own, answer
        self._append(json.dumps({"line": line, "prompt": own, "answer": answer}))

    def answers(self, prompts: Sequence[object]) -> list[dict[str, Any]]:
        """Return all answers in the order of their prompts."""
        found = [self.answer(line, prompt) for line, prompt in enumerate(prompts, 1)]
        assert all(one is not None for one in found), "every prompt is answered"
        return [one for one in found if one is not None]

    def close(self, *, delete: bool = False) -> None:
        """Close the file, and delete it where the output is complete, or where it has no answer."""
        if delete or not self._rows:
            self.path.unlink(missing_ok=True)  # before the lock is let go
        self._file.close()


def digest(prompt: object) -> str:
    """Return what tells a prompt from others."""
    return hashlib.blake2b(json.dumps(prompt).encode(), digest_size=12).hexdigest()
