"""Comparing hashes of answers: what did not run is as loud as what differs, and a file of other prompts is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import text_hashes


def test_what_differs_what_is_new_and_what_did_not_run_is_listed() -> None:
    expected = {"avx2/plain/greedy": "1", "avx2/eagle/greedy": "2", "torch/plain/greedy": "3"}
    found = {"avx2/plain/greedy": "9", "avx2/medusa/greedy": "4"}
    assert text_hashes.differences(expected, found, ["avx2"]) == [
        "differs: avx2/plain/greedy",
        "new: avx2/medusa/greedy",
        "did not run: avx2/eagle/greedy",
    ]
    assert not text_hashes.differences(expected, expected, ["avx2", "torch"])


def test_hashes_of_other_prompts_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "known.json").write_text(json.dumps({"num_prompts": 60, "hashes": {}}))
    monkeypatch.setattr("sys.argv", ["text_hashes", "check", str(tmp_path / "known.json"), "--limit", "10"])
    with pytest.raises(SystemExit):
        text_hashes.main()
    assert "is of 60 prompts: give --limit 60" in capsys.readouterr().err
