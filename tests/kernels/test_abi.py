"""Every structure that ctypes mirrors has the size of its C++ original, and every field its place in it."""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from vivace.kernels import chain, library
from vivace.kernels.build import SOURCES, BuildError, compiler

STRUCTURES = {
    name[1:]: kind
    for module in (library, chain)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, ctypes.Structure) and kind is not ctypes.Structure
}
NOT_MIRRORED = {"ExactSide", "GridSide", "Greedy", "Perturbed", "Screened"}
"""Structures that no Python code lays out."""


def spelled(field: str) -> str:
    """A field's name in C++, which has no reason to avoid Python's keyword ``in``."""
    return {"in_width": "in", "out_width": "out"}.get(field, field)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Sizes by structure and offsets by ``structure.field``, as the compiler has them."""
    lines = []
    for name, kind in STRUCTURES.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in kind._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {spelled(field)}));')
    folder = tmp_path_factory.mktemp("abi")
    source = folder / "abi.cpp"
    includes = '#include <cstddef>\n#include <cstdio>\n#include "abi.h"\n'
    source.write_text(f"{includes}int main() {{\n" + "\n".join(lines) + "\n}\n")
    try:
        command = [compiler(), "-std=c++20", "-Wno-invalid-offsetof", f"-I{SOURCES}", str(source), "-o"]
    except BuildError as error:
        pytest.skip(str(error))
    subprocess.run([*command, str(folder / "abi")], check=True, capture_output=True, text=True)
    printed = subprocess.run([str(folder / "abi")], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in (line.split() for line in printed.splitlines())}


@pytest.mark.parametrize("name", sorted(STRUCTURES))
def test_a_mirrored_structure_lies_as_the_original(name: str, originals: dict[str, int]) -> None:
    kind = STRUCTURES[name]
    assert ctypes.sizeof(kind) == originals[name]
    offsets = {field: getattr(kind, field).offset for field, *_ in kind._fields_}
    assert offsets == {field: originals[f"{name}.{field}"] for field in offsets}


def test_no_structure_is_forgotten() -> None:
    """A structure in ``abi.h`` is mirrored, or is one that Python never lays out."""
    written = Path(SOURCES, "abi.h").read_text(encoding="utf-8")
    assert set(re.findall(r"^struct (\w+) \{", written, re.MULTILINE)) == set(STRUCTURES) | NOT_MIRRORED
