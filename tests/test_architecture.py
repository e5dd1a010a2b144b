"""The house plan as a test: which room may import which, who may touch which library, how files are named and sized.

Imports are read with ``ast``, nothing is executed. To add a room, add one line to ``FLOORS``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "vivace"

# A room may import rooms on the floors below it, never a sibling.
FLOORS: dict[str, int] = {
    "errors": 0,
    "units": 1,
    "files": 1,
    "configuration": 1,
    "kernels": 1,
    "prompts": 2,
    "core": 2,
    "checkpoint": 3,
    "decode": 3,
    "train": 4,
    "prefill": 5,
    "storage": 5,
    "palette": 5,
    "adapters": 5,
    "parallel": 5,
    "seq2seq": 5,
    "diffusion": 5,
    "speech": 5,
    "methods": 6,
    "evaluate": 7,
    "answer": 7,
    "options": 7,
    "engine": 8,
    "assistant": 9,
    "conversation": 9,
    "transformers_bridge": 9,
    "batch": 9,
    "recipes": 9,
    "tuning": 9,
    "serve": 10,
    "cli": 11,
    "__main__": 12,
    "__init__": 12,
}

# Libraries that only some rooms may import.
OWNERS: dict[str, set[str]] = {
    "transformers": {"checkpoint"},
    "huggingface_hub": {"checkpoint"},
    "safetensors": {"checkpoint"},
    "tokenizers": {"checkpoint"},
    "typer": {"cli"},
    "rich": {"cli"},
    "sacrebleu": {"evaluate"},
    "rouge_score": {"evaluate"},
    "llama_cpp": {"evaluate"},
    "tensorboard": {"train"},
    "yaml": {"recipes"},
    "torch.distributed": {"parallel", "palette"},  # our own ranks; the process group of a user who trains
}

# The bench measures other engines beside ours, so it may import them where they are called.
LAZY_EXCEPTIONS: set[tuple[str, str]] = {("evaluate", "transformers"), ("transformers_bridge", "transformers")}

# Rooms that load without torch, so that `vivace --help` and `import vivace` are quick.
LIGHT = {"__init__", "__main__", "errors", "units", "files", "configuration", "prompts", "cli"}
LIGHT_FILES = {"spec", "table"}
"""Files that do so in any room: what lists of methods know about each of them."""
HEAVY = {"torch", "transformers", "numpy"}

FORBIDDEN_WORDS = {"util", "utils", "helper", "helpers", "common", "manager", "managers", "misc", "v2", "new", "old"}
MAX_LINES = 500


class Import(NamedTuple):
    """One imported module: where, what, and whether it is loaded only when a function runs."""

    path: Path
    line: int
    module: str
    is_lazy: bool

    @property
    def room(self) -> str:
        return room_of(self.path)

    def __str__(self) -> str:
        return f"{self.path.relative_to(PACKAGE)}:{self.line} imports {self.module}"


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def imports(path: Path) -> Iterator[Import]:
    """Imports of a file; those under ``if TYPE_CHECKING`` count as edges, but load nothing."""

    def walk(node: ast.AST, is_lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(path, node.lineno, alias.name, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                folder = path.relative_to(PACKAGE.parent).parts[: -node.level]
                base = ".".join([*folder, *([base] if base else [])])
            names = [f"vivace.{alias.name}" for alias in node.names] if base == "vivace" else [base]
            yield from (Import(path, node.lineno, name, is_lazy) for name in names)
        guards = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        defers = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, is_lazy or guards or defers)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), False)


def all_imports() -> list[Import]:
    return [found for path in sources() for found in imports(path)]


def illegal(found: Import) -> bool:
    """Whether an import goes up, sideways, or to a library another room owns."""
    top, _, rest = found.module.partition(".")
    if top != "vivace":
        owners = OWNERS.get(".".join(found.module.split(".")[:2]), OWNERS.get(top))
        is_excepted = found.is_lazy and (found.room, top) in LAZY_EXCEPTIONS
        return owners is not None and found.room not in owners and not is_excepted
    target = rest.split(".")[0] or "__init__"
    if target not in FLOORS:  # a name of vivace/__init__.py, such as __version__
        target = "__init__"
    if target == found.room:
        return False
    if target == "__init__":
        return found.room != "cli" and found.room != "__main__"
    return FLOORS[target] >= FLOORS[found.room]


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(path) for path in sources()}
    assert rooms <= set(FLOORS), f"rooms without a floor: {sorted(rooms - set(FLOORS))}"


def test_imports_point_down() -> None:
    wrong = [str(found) for found in all_imports() if illegal(found)]
    assert not wrong, "imports that go up, sideways or into another room's library:\n" + "\n".join(wrong)


TECHNIQUES = sorted(path.name for path in (PACKAGE / "methods").iterdir() if (path / "spec.py").is_file())


def test_techniques_do_not_know_one_another() -> None:
    """A technique imports the floors below and what a spec is made of, neither its siblings nor their table."""
    assert len(TECHNIQUES) > 10
    wrong = []
    for found in all_imports():
        place = found.path.relative_to(PACKAGE).parts
        target = found.module.split(".")[1:]
        if place[0] == "methods" and place[1] in TECHNIQUES and target[:1] == ["methods"]:
            wrong += [str(found)] if target[1:] != ["spec"] and target[1:2] != [place[1]] else []
    assert not wrong, "techniques that lean on a sibling:\n" + "\n".join(wrong)


def test_few_files_know_how_native_code_is_called() -> None:
    """``ctypes`` stays with the kernels, their backend, file readers, what trims memory and the llama.cpp system."""
    places = ("kernels/", "core/cpu/", "storage/", "serve/trimming.py", "evaluate/llamacpp.py")
    wrong = [str(found) for found in all_imports() if found.module == "ctypes" and not within(found, *places)]
    kernels = {f"vivace.kernels.{name}" for name in ("native", "library", "chain")}
    below = [found for found in all_imports() if found.module in kernels and found.room == "core"]
    wrong += [str(found) for found in below if not within(found, "core/cpu/")]
    assert not wrong, "imports that belong behind the backend:\n" + "\n".join(wrong)


def within(found: Import, *places: str) -> bool:
    return found.path.relative_to(PACKAGE).as_posix().startswith(places)


def test_light_rooms_load_without_torch() -> None:
    heavy_rooms = set(FLOORS) - LIGHT
    wrong = []
    for found in all_imports():
        top, _, rest = found.module.partition(".")
        is_heavy_room = rest.split(".")[0] in heavy_rooms and rest.split(".")[-1] not in LIGHT_FILES
        loads_heavy = top in HEAVY or (top == "vivace" and is_heavy_room)
        is_light = found.room in LIGHT or found.path.stem in LIGHT_FILES
        if is_light and loads_heavy and not found.is_lazy:
            wrong.append(str(found))
    assert not wrong, "imports to move into the function that needs them:\n" + "\n".join(wrong)


def test_names_are_nouns() -> None:
    wrong = [str(path) for path in sources() if FORBIDDEN_WORDS & set(path.stem.lower().split("_"))]
    wrong += [str(path) for path in PACKAGE.rglob("*") if path.is_dir() and path.name in FORBIDDEN_WORDS]
    assert not wrong, f"name what is in these files: {wrong}"


def test_no_room_is_empty() -> None:
    for init in PACKAGE.rglob("__init__.py"):
        has_siblings = any(path != init and path.suffix in {".py", ".cpp"} for path in init.parent.rglob("*"))
        has_code = any(not isinstance(node, ast.Expr) for node in ast.parse(init.read_text(encoding="utf-8")).body)
        assert has_siblings or has_code, f"{init.parent.relative_to(PACKAGE)} is an empty package"


def test_files_stay_readable() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    long = {str(path.relative_to(PACKAGE)): count for path, count in lengths.items() if count > MAX_LINES}
    assert not long, f"files over {MAX_LINES} lines; two nouns live here: {long}"


def test_every_module_says_what_it_is_for() -> None:
    silent = [str(path) for path in sources() if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert not silent, f"modules without a docstring: {silent}"


@pytest.mark.parametrize(
    ("file", "code", "is_wrong"),
    [
        ("core/model.py", "import vivace.kernels.norm", False),
        ("core/model.py", "from vivace import errors", False),
        ("core/model.py", "from vivace.decode.loop import x", True),
        ("core/model.py", "from .attention import x", False),
        ("core/model.py", "from ..checkpoint import x", True),
        ("core/model.py", "def f():\n    from vivace import engine", True),
        ("core/model.py", "from vivace import load", True),
        ("methods/multirate/gates.py", "from vivace.engine import x", True),
        ("decode/loop.py", "import transformers", True),
        ("decode/loop.py", "import torch.distributed", True),
        ("parallel/world.py", "import torch.distributed", False),
        ("decode/loop.py", "def f():\n    import transformers", True),
        ("evaluate/peers.py", "def f():\n    import transformers", False),
        ("evaluate/peers.py", "import transformers", True),
        ("checkpoint/hub.py", "from huggingface_hub import x", False),
        ("cli/generate.py", "from vivace import __version__", False),
    ],
)
def test_the_rules_bite(file: str, code: str, is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: code)
    assert any(illegal(found) for found in imports(PACKAGE / file)) is is_wrong
