"""Count repeated code: pairs of places in ``src/`` that share six or more neighbouring lines.

    python -m tools.repeats            the number of pairs
    python -m tools.repeats --show     their places, too

Docstrings, comments, imports and blank lines are left out before lines are compared: neighbours are those of what is
left. Where more than six lines agree, the whole stretch is one pair.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).resolve().parents[1] / "src" / "vivace"
LEAST = 6
"""Number of neighbouring lines that make a repetition."""
SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


class Line(NamedTuple):
    """A line of code as it is compared."""

    number: int
    """Its number in the file, from 1."""
    text: str
    """Its tokens with one space between them, so that indentation and comments do not count."""


class Repeat(NamedTuple):
    """Two places, each a file and the number of a line, and how many lines they share."""

    first: tuple[str, int]
    second: tuple[str, int]
    count: int


def left_out(tree: ast.Module) -> set[int]:
    """Return the numbers of lines of docstrings and imports."""
    numbers: set[int] = set()
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            numbers.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return numbers


def lines_of(text: str) -> list[Line]:
    """Return the lines of a file that are compared."""
    ignored, tokens = left_out(ast.parse(text)), defaultdict[int, list[str]](list)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT and token.start[0] not in ignored:
            tokens[token.start[0]].append(token.string)
    return [Line(number, " ".join(words)) for number, words in sorted(tokens.items())]


def shared(one: Sequence[Line], at: int, other: Sequence[Line], there: int) -> int:
    """Return how many lines agree from ``at`` in one file and from ``there`` in another on."""
    pairs = zip(one[at:], other[there:], strict=False)
    count = 0
    for mine, theirs in pairs:
        if mine.text != theirs.text:
            break
        count += 1
    return count


def repeats(files: Mapping[str, Sequence[Line]]) -> Iterator[Repeat]:
    """Yield the pairs of places that share ``LEAST`` or more lines, each from its first line on."""
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for name, lines in files.items():
        for at in range(len(lines) - LEAST + 1):
            places[tuple(line.text for line in lines[at : at + LEAST])].append((name, at))
    for found in places.values():
        for (one, at), (other, there) in combinations(found, 2):
            if at and there and files[one][at - 1].text == files[other][there - 1].text:
                continue  # part of a longer stretch
            count = shared(files[one], at, files[other], there)
            if one != other or there - at >= count:  # a stretch that overlaps itself is no second place
                yield Repeat((one, files[one][at].number), (other, files[other][there].number), count)


def main() -> None:
    """Print the number of pairs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--show", action="store_true", help="print the places")
    parser.add_argument("--sources", type=Path, default=SOURCES, help="folder to search")
    given = parser.parse_args()
    paths = sorted(given.sources.rglob("*.py"))
    files = {str(path.relative_to(given.sources)): lines_of(path.read_text(encoding="utf-8")) for path in paths}
    found = sorted(repeats(files), key=lambda pair: -pair.count)
    for pair in found if given.show else ():
        print(f"{pair.count:3} {pair.first[0]}:{pair.first[1]}  {pair.second[0]}:{pair.second[1]}")
    print(f"{len(found)} pairs of places share {LEAST} or more lines")


if __name__ == "__main__":
    main()
