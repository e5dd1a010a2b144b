"""A command is killed and begun again, and what each process took is kept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import captions, killed_training
from benchmarks.killed_training import learnt, run_parts, shown, tables
from benchmarks.result_files import write_report

WORK = """
import sys, time
from pathlib import Path
place = Path(sys.argv[1])
held = bytearray(64 << 20)
place.write_text(place.read_text() + "x" if place.exists() else "x")
time.sleep(30 if len(place.read_text()) < 3 else 0)
print("third")
"""


def test_a_process_that_is_killed_is_begun_again(tmp_path: Path) -> None:
    parts, written = run_parts([sys.executable, "-c", WORK, str(tmp_path / "count")], [1.5, 1.5, 60.0])
    assert [part.was_killed for part in parts] == [True, True, False], "the third ends before it would be killed"
    assert written == "third\n"
    assert all(64 << 20 < part.peak_bytes < 1 << 30 for part in parts)
    assert all(1.5 <= part.seconds < 20 for part in parts[:2])


def test_an_error_ends_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        run_parts([sys.executable, "-c", "raise SystemExit(3)"], [60.0])
    assert end.value.code == 3


def test_folders_are_not_told() -> None:
    words = ["train", "chat", "--model", "/home/me/models/small", "--minutes", "60", "--out", "/home/me/long"]
    assert shown(words) == ["train", "chat", "--model", "small", "--minutes", "60"]


def test_a_row_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "own.jsonl").write_text(
        '{"tokens": 30, "elapsed_s": 10.0}\n{"tokens": 40, "elapsed_s": 20.0}\n'
    )
    progress = {"step": 5, "num_tokens": 900}
    monkeypatch.setattr(killed_training, "read_state", lambda path: {"progress": progress})
    origin = {"cpu": "A processor", "num_threads": 2, "commit": "0123456789ab"}
    parts = [
        {"seconds": 61.0, "peak_bytes": 1 << 30, "was_killed": True},
        {"seconds": 60.0, "peak_bytes": 2 << 30, "was_killed": False},
    ]
    runs = [{"method": "plain", "speedup": 1.0}, {"method": "multirate", "speedup": 1.25}]
    report = {"provenance": origin, "command": ["train", "chat"], "parts": parts, "runs": runs}
    write_report(tmp_path / "results" / "hour.json", {**report, "learnt": learnt(tmp_path)})
    found = tables(tmp_path / "results")
    assert f"`vivace train chat`. A processor, 2 threads, {captions.tree(origin)}." in found
    row = found.splitlines()[-1]
    for cell in (
        "killed after 1 min 01 s, the last to its end",
        "2 min 01 s",
        "70 tokens in 20.00 s",
        "1.0 GiB, 2.0 GiB",
    ):
        assert f"| {cell} |" in row
    assert "900 tokens in 5 steps" in row
    assert "`multirate` 1.25x on held-back prompts" in row
