"""Thresholds of a SwiGLU model: where nothing is left out the text is the model's, and the more is, the less it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import thresholds
from benchmarks.following import followed, written
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.load import load_decoder
from vivace.prompts import Prompt, save_prompts


def test_a_model_goes_along_with_its_own_text(tmp_path: Path) -> None:
    model = load_decoder(make_checkpoint(tmp_path / "model"), dtype="float32")
    text = written(model, [5, 6, 7], 9)
    found = followed(model, [text, text])
    assert (found.num_tokens, found.agreed) == (16, 1.0)
    assert found.surprise == pytest.approx(0, abs=1e-5)
    other = followed(load_decoder(make_checkpoint(tmp_path / "other", seed=1), dtype="float32"), [text])
    assert other.agreed < 0.5
    assert other.surprise > 0.1


def test_all_rows_follow_the_same_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_checkpoint(tmp_path / "model", layers=3)
    rows = [Prompt(f"{a}{b} is", (f"{b}{a} and",), "text") for a in "abcdef" for b in "vwxyz"]
    save_prompts(tmp_path / "rows.jsonl", rows)
    asked = ["thresholds", str(model), "--calibrate", str(tmp_path / "rows.jsonl"), "--share", "8"]
    asked += [
        "--prompts",
        str(tmp_path / "rows.jsonl"),
        "--work",
        str(tmp_path / "work"),
        "--errors",
        "0",
        "0.1",
        "0.6",
    ]
    asked += ["--limit", "3", "--tokens", "8", "--repeats", "2", "--json", str(tmp_path / "out" / "found.json")]
    monkeypatch.setattr("sys.argv", asked)
    thresholds.main()
    found = json.loads((tmp_path / "out" / "found.json").read_text(encoding="utf-8"))["thresholds"]
    assert [*found["rows"]] == [thresholds.EVERY, "0", "0.1", "0.6"]
    assert all(len(row["seconds"]) == 2 and row["num_tokens"] == 21 for row in found["rows"].values())
    least, some, most = (found["rows"][name] for name in ("0", "0.1", "0.6"))
    assert abs(least["surprise"]) < 0.05
    assert least["active_share"] > some["active_share"] > most["active_share"]
    assert most["error"] > some["error"] > least["error"] == 0
    written_table = thresholds.tables(tmp_path / "out")
    assert "| error at most 0.1 |" in written_table
    assert f"| {thresholds.EVERY} | 100% | 0% |" in written_table
