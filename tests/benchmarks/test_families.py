"""Plain decoding by family: every family has a shape, and what was measured becomes a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import families, family_tables
from vivace.checkpoint.families import FAMILIES


def test_every_family_has_a_shape() -> None:
    decoders = {name for name, family in FAMILIES.items() if not family.has_encoder}
    assert {*families.SHAPES, "gemma3"} == decoders, "gemma3 is gemma3_text inside a multimodal file"


@pytest.mark.slow
def test_what_was_measured_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small model of a kind that native kernels once ran layer by layer, in few tokens."""
    monkeypatch.setitem(families._SIZES, "num_hidden_layers", 2)
    monkeypatch.setitem(families._SIZES, "vocab_size", 128)
    torch.manual_seed(0)
    folder = families.make_random("olmo2", tmp_path / "olmo2")
    found = families.measure(folder, prompts=2, tokens=6, repeats=1)
    origin = {"cpu": "some", "num_threads": 2, "commit": "abc", "best_kernels": found["kernels"]}
    report = {"provenance": origin, "setting": {"prompts": 2, "tokens": 6, "repeats": 1}, "models": {"olmo2": found}}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "one.json").write_text(json.dumps(report))
    written = family_tables.tables(tmp_path / "results")
    assert "`olmo2`" in written
    assert "2 prompts of random tokens, 6 tokens each" in written
