"""``vivace bench beams``: the same ids, what is counted, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.test_encoder_decoders import make
from vivace.cli.app import run
from vivace.evaluate.beams import PARTS, shares_of


def report_of(folder: Path, out: Path, *words: str) -> dict[str, object]:
    command = ["bench", "beams", "--model", str(folder), "--limit", "3", "--batches", "2", "--max-new-tokens", "6"]
    assert run([*command, "--longest-prompt", "20", "--repeats", "1", "--json", str(out), *words]) == 0
    found: dict[str, object] = json.loads(out.read_text())
    return found


def test_both_write_the_same_and_sources_are_counted_once(tmp_path: Path) -> None:
    asked = ("--num-beams", "3", "--peers", "transformers", "--max-new-tokens", "24")
    report = report_of(make(tmp_path, "t5"), tmp_path / "out.json", *asked)
    ours, theirs = report["batches"]["2"]  # type: ignore[index]
    assert ours["num_tokens"] > 0
    if theirs["dtype"] == "float32":
        assert theirs["num_different"] == 0
        assert theirs["num_tokens"] == ours["num_tokens"]
    longest = 20
    assert theirs["cross_cache_bytes"] == 2 * 2 * (2 * longest * 3) * 4 * 8 * (4 if theirs["dtype"] == "float32" else 2)
    assert ours["inputs_per_s"] > 0
    assert len(ours["seconds"]) == 1
    parts = ours["parts_s"]
    assert tuple(parts) == PARTS
    assert all(seconds > 0 for seconds in parts.values())
    assert 0.5 < sum(parts.values()) / ours["seconds"][0] <= 1, "batches are all that a round is"
    assert theirs["parts_s"] is None
    assert all(row["peak_bytes"] is None or row["peak_bytes"] >= 0 for row in (ours, theirs))


def test_one_beam_is_not_divided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its passes are not timed one by one, and what is not known is not called zero."""
    report = report_of(make(tmp_path, "t5"), tmp_path / "out.json", "--num-beams", "1", "--peers", "none")
    [ours] = report["batches"]["2"]  # type: ignore[index]
    assert ours["parts_s"] is None
    assert ours["num_tokens"] > 0
    assert shares_of(ours["parts_s"]) == "-"
    assert "0/0/" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_el_is_a_row_with_what_its_sources_take(tmp_path: Path, kind: str) -> None:
    """Two sources, each in one block of states; keys and values of two layers are four times that for E = KD."""
    report = report_of(make(tmp_path, kind), tmp_path / "out.json", "--num-beams", "3", "--peers", "el")
    assert report["setting"]["attention"] == "shared"  # type: ignore[index]
    ours, el = report["batches"]["2"]  # type: ignore[index]
    assert (ours["system"], el["system"], el["num_different"]) == ("vivace", "el", 0)
    assert el["num_tokens"] == ours["num_tokens"] > 0
    assert el["cross_cache_bytes"] == 2 * 64 * 32 * 4
    assert ours["cross_cache_bytes"] >= 2 * 2 * el["cross_cache_bytes"]
    assert el["parts_s"]["encode"] > 0


@pytest.mark.skipif(importlib.util.find_spec("ctranslate2") is None, reason="needs the extra ctranslate2")
def test_ctranslate2_takes_the_same_ids(tmp_path: Path) -> None:
    report = report_of(make(tmp_path, "t5"), tmp_path / "out.json", "--num-beams", "1", "--peers", "ctranslate2")
    ours, theirs = report["batches"]["2"]  # type: ignore[index]
    assert theirs["num_different"] == 0, "greedy texts of the same weights in float32"
    assert theirs["num_tokens"] == ours["num_tokens"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--peers", "fairseq"], "--peers 'fairseq' is none of"),
        (["--batches", "1,a"], "--batches has 'a'; write numbers from 1 on"),
        (["--peers", "el", "--attention", "el"], "--attention el is what --peers el would be beside"),
    ],
)
def test_what_does_not_fit_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert run(["bench", "beams", "--model", str(make(tmp_path, "t5")), "--limit", "1", *words]) != 0
    assert says in capsys.readouterr().err
