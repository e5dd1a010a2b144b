"""One word per idea: identifiers that were replaced by the field's terms do not come back.

``words.csv`` lists them as module, old identifier, new identifier; the new one must be defined there, the old one
nowhere.
"""

from __future__ import annotations

import ast
import csv
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "vivace"
WORDS = Path(__file__).with_name("words.csv")
COMMON = {"given", "roots", "leaves", "takes", "hold", "law", "learnt", "serve", "again", "expected", "Choice", "Pool"}
"""Old identifiers that are ordinary words elsewhere: refused in their own module only."""


def defined() -> dict[str, set[str]]:
    """Names of classes, functions and annotated attributes by module, private ones included."""
    names: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            place = names[path.relative_to(PACKAGE).as_posix()]
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                place.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                place.add(node.target.id)
    return names


def test_old_words_stay_replaced() -> None:
    names = defined()
    everywhere = set().union(*names.values())
    wrong = []
    for row in csv.DictReader(WORDS.read_text(encoding="utf-8").splitlines()):
        module, old, new = row["module"], row["old"], row["new"]
        wrong += [] if new in names[module] else [f"{module} does not define {new}"]
        wrong += [f"{old} is defined, in {module} or elsewhere"] if old in names[module] else []
        wrong += [f"{old} is defined again"] if old not in COMMON and old in everywhere else []
    assert not wrong, "\n".join(wrong)
