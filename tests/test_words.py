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
COMMON = {
    *("given", "roots", "leaves", "takes", "hold", "law", "learnt", "serve", "again", "expected"),
    *("Pool", "Piece", "Fresh", "Choice", "Root", "Parts", "Part", "Shape", "Stateful", "Progress"),
    *("Memory", "Saved", "Answer", "Rows", "Reading", "Routers", "Place", "Bias"),
    *("gates", "at_gate", "_ask"),
}
"""Old identifiers that may stand for something else in other modules: refused in their own only."""


def defined() -> dict[str, set[str]]:
    """Names of classes, functions and module-level names by module, private ones included."""
    names: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        place, tree = names[path.relative_to(PACKAGE).as_posix()], ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Assign):
                place.update(target.id for target in node.targets if isinstance(target, ast.Name))
        for node in ast.walk(tree):
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


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(PACKAGE).as_posix())
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert not shared, f"classes that share a name: {shared}"
