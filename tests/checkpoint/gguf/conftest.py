"""Files are described in a cache of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache that is in use."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("VIVACE_CACHE_DIR", str(folder))
    return folder
