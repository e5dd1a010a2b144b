"""The table of methods."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import vivace.methods
from vivace.errors import ConfigError
from vivace.methods.spec import MethodSpec
from vivace.methods.table import METHODS, find_method

FOLDERS = sorted(path.parent.name for path in Path(vivace.methods.__path__[0]).glob("*/spec.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_spec_of_a_folder_is_in_the_table(folder: str) -> None:
    found = vars(import_module(f"vivace.methods.{folder}.spec")).values()
    specs = [value for value in found if isinstance(value, MethodSpec)]
    assert specs, f"methods/{folder}/spec.py describes no method"
    for spec in specs:
        assert METHODS.get(spec.name) is spec, f"add {spec.name!r} of methods/{folder}/spec.py to methods/table.py"


def test_nothing_else_is() -> None:
    assert len(FOLDERS) > 10
    assert all(method.name == name for name, method in METHODS.items())
    assert list(METHODS)[:2] == ["auto", "plain"], "these are listed first"


def test_an_unknown_method_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'lookup'"):
        find_method("lokup")
    assert find_method("plain").lossless
