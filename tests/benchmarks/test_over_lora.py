"""Drafts for a LoRA are measured beside those of the base, on the same texts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import over_lora
from tests.adapters.loras import make_lora
from tests.tiny_checkpoints import make_adapter, make_checkpoint
from vivace.prompts import Prompt, save_prompts


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    base = make_checkpoint(tmp_path / "base", layers=4)
    make_adapter(base / "adapters" / "multirate", base)
    lora = make_lora(tmp_path / "sql", base)
    save_prompts(tmp_path / "rows.jsonl", [Prompt("aka", ("b",)), Prompt("bob", ("a",))])
    return [f"{base}={lora}", "--prompts", str(tmp_path / "rows.jsonl"), "--tokens", "8", "--repeats", "2"]


def test_all_ways_write_what_plain_decoding_writes(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_adapter(tmp_path / "sql" / "drafting" / "multirate", tmp_path / "base")
    written = tmp_path / "results" / "one.json"
    monkeypatch.setattr(sys, "argv", ["over_lora", *words, "--json", str(written)])
    over_lora.main()
    report = json.loads(written.read_text(encoding="utf-8"))
    (found,) = report["reports"]
    assert found["num_different"] == dict.fromkeys(over_lora.WAYS, 0)
    assert found["ratios"]["plain"] == 1.0
    assert found["tokens_per_pass"]["plain"] == 1.0
    assert all(low <= found["ratios"][way] <= high for way, (low, high) in found["ratio_ranges"].items())
    table = over_lora.tables(written.parent)
    assert "**base** with the LoRA `sql` worn, bfloat16, 2 prompts of rows" in table
    assert all(f"| {way} |" in table for way in over_lora.WAYS)


def test_a_lora_without_drafts_is_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["over_lora", *words])
    with pytest.raises(SystemExit, match="has no draft weights: vivace train multirate --adapter"):
        over_lora.main()
