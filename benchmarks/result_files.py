"""Result files: written once by a benchmark, read by the tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vivace.files import write_text


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write a result file into a folder that need not be there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(report, indent=1) + "\n")


def tables_of(folder: Path, tables: Callable[[Any], Sequence[str]]) -> str:
    """Return the tables of all result files of a folder, or what stands where there is none."""
    parts = [part for path in sorted(folder.glob("*.json")) for part in tables(json.loads(path.read_text("utf-8")))]
    return "\n\n".join(parts) or "No run is committed yet."
