"""Tiny checkpoints on disk, made with transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.families import make


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> its checkpoint directory; do not write there."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            make(family).save_pretrained(made[family])
        return made[family]

    return folder


@pytest.fixture
def llama(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy to spoil."""
    folder = tmp_path / "llama"
    shutil.copytree(saved("llama"), folder)
    return folder
