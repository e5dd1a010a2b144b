"""A file of random bytes, for whatever reads files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from vivace.storage.io.readers import PAGE

SIZE = 40 * PAGE


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(0).randbytes(SIZE)


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "file").write_bytes(content)
    return tmp_path / "file"
