"""Curves beside lines, when the extra is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vivace.errors import DependencyError
from vivace.train.report import Curves, Lines, StepMeans


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(DependencyError, match=r"vivace\[train\]"):
        Curves(tmp_path, Lines(lambda line: None))


def test_curves_are_written_and_lines_still_said(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    said: list[str] = []
    curves = Curves(tmp_path, Lines(said.append))
    curves.note("begins")
    curves.reading(StepMeans(1, 0.5, 1.0, 100.0, 3.0, {"loss": 1.0}))
    curves.held_back(1, {"loss": 2.0}, False)
    assert len(said) == 3
    assert list(tmp_path.glob("events.*"))
