"""Result files: written once by a benchmark, read by the tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vivace.files import write_text

NO_RUN = "No run is committed yet."
"""What stands where there is no result file."""


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write a result file into a folder that need not be there."""
    write_text(path, json.dumps(report, indent=1) + "\n")


def read_named(folder: Path, pattern: str = "*.json") -> Iterator[tuple[str, Any]]:
    """Yield the name and the content of each result file of a folder, in the order of the names."""
    for path in sorted(folder.glob(pattern)):
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))


def tables_of(folder: Path, tables: Callable[[Any], Sequence[str]]) -> str:
    """Return the tables of all result files of a folder, or what stands where there is none."""
    return "\n\n".join(part for _, report in read_named(folder) for part in tables(report)) or NO_RUN
