from __future__ import annotations

import inspect

import pytest

from vivace import errors
from vivace.errors import VivaceError, nearest

ERRORS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, VivaceError)]


def test_docstring_draws_the_whole_tree() -> None:
    assert len(ERRORS) == 15
    drawing = (errors.__doc__ or "").splitlines()
    depth = {kind.__name__: kind.mro().index(VivaceError) for kind in ERRORS}
    for name, level in depth.items():
        (line,) = [line for line in drawing if f"{name} " in f"{line} " and line.startswith("    ")]
        assert line.index(name) == 4 + 4 * level


@pytest.mark.parametrize("kind", ERRORS)
def test_only_usage_errors_exit_with_two(kind: type[VivaceError]) -> None:
    assert kind.exit_code == (2 if issubclass(kind, errors.UsageError) else 1)


def test_nearest_names_a_close_match_or_the_whole_set() -> None:
    assert nearest("lokup", ["plain", "lookup"]) == "; did you mean 'lookup'?"
    assert nearest("lookup+plain", ["plain", "plain+lookup"]) == "; did you mean 'plain+lookup'?"
    assert nearest("zzz", ["plain", "lookup"]) == "; choose from lookup, plain"
    assert nearest(None, ["plain", "lookup"]) == "; choose from lookup, plain"
