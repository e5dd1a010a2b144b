"""Every planted bug still fits the program, and names tests that exist."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.mutants.planting import ROOT, changed
from tests.mutants.records import MUTANTS, Mutant, OutOfDate, Replaced


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_can_be_planted(mutant: Mutant) -> None:
    assert changed(mutant) != (ROOT / mutant.file).read_bytes()


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_those_who_notice_exist(mutant: Mutant) -> None:
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert name.split("[")[0] in functions_of(file), f"mend the record {mutant.name!r}: there is no {test}"


def test_names_are_different() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 16


@pytest.mark.parametrize("old", ["is not there", "def "])
def test_a_record_that_does_not_fit_is_named(old: str) -> None:
    stale = Mutant("nothing", "src/vivace/core/sampling.py", Replaced(old, ""), ())
    with pytest.raises(OutOfDate, match=r"mend the record 'nothing' in .*sampling\.py: this text stands there"):
        changed(stale)
    with pytest.raises(OutOfDate, match="mend the record 'nothing'"):
        changed(Mutant("nothing", "src/vivace/nowhere.py", Replaced(old, ""), ()))
