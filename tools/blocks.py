"""Parts of Markdown files that a script writes, so that text by hand and generated facts share a page.

A part stands between ``<!-- begin NAME: the script -->`` and ``<!-- end NAME -->``, each on a line of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path


def fill(text: str, name: str, body: str) -> str:
    """Return ``text`` with the part called ``name`` replaced.

    Raises:
        ValueError: the text has no such part, or more than one.
    """
    pattern = re.compile(rf"(<!-- begin {re.escape(name)}:[^>]*-->\n).*?(<!-- end {re.escape(name)} -->)", re.DOTALL)
    found = pattern.findall(text)
    if len(found) != 1:
        raise ValueError(f"expected one part {name!r} between its markers, found {len(found)}")
    return pattern.sub(lambda match: f"{match[1]}{body.strip()}\n{match[2]}", text)


def fill_file(path: Path, parts: Mapping[str, str]) -> str:
    """Return the text that a file should have."""
    text = path.read_text(encoding="utf-8")
    for name, body in parts.items():
        try:
            text = fill(text, name, body)
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from error
    return text


def settle(wanted: Mapping[Path, str], *, check: bool) -> list[Path]:
    """Write the wanted text to files, or with ``check`` only compare; return the files that differ from it."""
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in [] if check else stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")
    return stale


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table; bars inside cells are escaped.

    Raises:
        ValueError: a row has more or fewer cells than the header.
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"a row of {len(row)} cells under {len(header)} headings: {' | '.join(row)[:200]}")
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
