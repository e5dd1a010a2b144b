"""Costs of ranks are measured quickly in tests, which do not depend on them."""

from __future__ import annotations

import pytest

from vivace.parallel import measuring


@pytest.fixture(autouse=True)
def quick_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time each part of a layer for a few calls only; forked ranks do so too."""
    monkeypatch.setattr(measuring, "WORK_S", 0.0)
