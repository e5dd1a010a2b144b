"""What choosing a soft prompt costs is measured beside a member that is named, and shown by prompt length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.prompt_choice import CHOSEN, NAMED, main, tables
from tests.tiny_checkpoints import make_checkpoint


def test_every_way_is_timed_at_every_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, target = make_checkpoint(tmp_path / "tiny"), tmp_path / "out" / "found.json"
    asked = ["prompt_choice", str(model), "--members", "2", "--entries", "3", "--lengths", "8", "40", "--tokens", "4"]
    monkeypatch.setattr("sys.argv", [*asked, "--repeats", "2", "--json", str(target)])
    main()
    found = json.loads(target.read_text())["prompt_choice"]
    assert len(found["first_s"]) == len(found["tokens_per_s"]) == 4
    for ways in (found["first_s"], found["tokens_per_s"]):
        assert all(len(values) == 2 and min(values) > 0 for way in ways.values() for values in way.values())
    found["first_s"] = {
        way: dict.fromkeys(("8", "40"), [1.25 if way == CHOSEN else 1.0] * 2) for way in found["first_s"]
    }
    found["first_s"][NAMED]["40"] = [1.25, 1.0]
    target.write_text(json.dumps({**json.loads(target.read_text()), "prompt_choice": found}))
    shown = tables(target.parent)
    assert "| 8 | 1.000 | 1.000 | 1.000 | 1.250 | +25.0% (+25.0% to +25.0%) |" in shown
    assert "| +12.5% (+0.0% to +25.0%) |" in shown
