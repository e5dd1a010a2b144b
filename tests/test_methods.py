"""The composition root reads each adapter once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_checkpoints import make_adapter, make_checkpoint
from vivace.checkpoint.load import load_decoder
from vivace.errors import ConfigError, MismatchError
from vivace.methods import composition
from vivace.methods.composition import Methods, adapters_by_method


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions that read a base or an adapter, in order."""
    made: list[str] = []
    for name in ("base_hash", "load_adapter"):
        true = getattr(composition, name)

        def noting(*args: Any, name: str = name, true: Any = true) -> Any:
            made.append(name)
            return true(*args)

        monkeypatch.setattr(composition, name, noting)
    return made


def test_methods_that_draft_with_the_same_weights_share_them(folder: Path, calls: list[str]) -> None:
    make_adapter(folder / "adapters" / "multirate", folder)
    found = Methods(load_decoder(folder), folder, {})
    for method in ("multirate", "auto", "multirate+lookup"):
        found.drafter(method)
    found.drafter("multirate", 2)
    assert calls == ["base_hash", "load_adapter"]


def test_auto_drafts_with_the_drafters_of_the_methods(folder: Path) -> None:
    """Rough copies of weights and what was measured are made once, whoever asks first."""
    make_adapter(folder / "adapters" / "multirate", folder)
    found = Methods(load_decoder(folder), folder, {})
    auto, multirate = found.drafter("auto"), found.drafter("multirate")
    assert multirate in auto.drafters
    assert found.drafter("lookup") in auto.drafters
    others = found.drafter("multirate+lookup"), found.drafter("multirate", 2)
    assert all(other.guess is multirate.guess for other in others)
    assert others[0] not in auto.drafters


def test_a_base_is_read_once_for_all_adapters_named(folder: Path, tmp_path: Path, calls: list[str]) -> None:
    assert adapters_by_method([], folder) == {}
    assert calls == []
    one, two = (make_adapter(tmp_path / name, folder) for name in ("one", "two"))
    with pytest.raises(ConfigError, match="are both adapters for multirate"):
        adapters_by_method([one, two], folder)
    assert calls == ["base_hash", "load_adapter", "load_adapter"]


def test_weights_of_another_adapter_are_refused(folder: Path) -> None:
    adapter = make_adapter(folder / "adapters" / "multirate", folder)
    config = adapter / "config.json"
    written = json.loads(config.read_text(encoding="utf-8"))
    written["config"]["bottleneck"] += 1
    config.write_text(json.dumps(written), encoding="utf-8")
    with pytest.raises(MismatchError, match=f"the weights in {re.escape(str(adapter))} do not fit its config.json"):
        Methods(load_decoder(folder), folder, {}).drafter("multirate")
