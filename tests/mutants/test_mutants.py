"""Planted bugs are noticed by the tests that are said to notice them, which pass where nothing is planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.planting import Copy
from tests.mutants.records import MUTANTS, Mutant


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    copy = Copy(tmp_path / "copy")
    failed, _ = copy.failures(mutant.tests)
    assert not failed, "tests that fail without a defect catch nothing"
    copy.plant(mutant)
    _, passed = copy.failures(mutant.tests)
    assert not passed, f"nobody noticed: {mutant.name}"
