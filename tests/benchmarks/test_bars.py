"""Bars that were set for plain decoding: which are missed, and quality of weight formats from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.bars import card, formats, quality_of, tables

MACHINE = {"cpu": "A CPU", "num_threads": 2, "commit": "abc"}


def test_a_bar_is_met_or_missed_by_what_was_measured(tmp_path: Path) -> None:
    rates = {
        **{"vivace bf16": 120.0, "vivace int8": 150.0, "vivace q4": 100.0, "transformers": 30.0},
        **{"llama.cpp": 100.0, "llama.cpp-q8_0": 130.0, "llama.cpp-q4_0": 200.0},
    }
    runs: list[dict[str, Any]] = [
        {"method": name, "tokens_per_s": r, "tokens_per_s_spread": [r, r * 1.4], "end_to_end_tokens_per_s": r / 2}
        for name, r in rates.items()
    ]
    report = {"provenance": MACHINE, "models": {"100M": {"kernels": "avx512", "runs": runs}, "twin": {}}}
    assert tables(tmp_path) == "No result is committed yet."
    (tmp_path / "peers.json").write_text(json.dumps(report))
    text = tables(tmp_path)
    assert "**A CPU, kernels avx512**, 2 threads, commit abc: 2 of 4 bars are missed." in text
    assert "| 100M | vivace bf16 | llama.cpp | 1.2x | 1.20x | 1.20x | met |" in text
    assert "| 100M | vivace int8 | llama.cpp-q8_0 | 1.2x | 1.15x | 1.15x | **missed** |" in text
    assert "| 100M | vivace q4 | llama.cpp-q4_0 | 1.2x | 0.50x | 0.50x | **missed** |" in text
    assert "| 100M | vivace bf16 | transformers | 4x | 4.00x | 4.00x | met |" in text
    runs[-1]["tokens_per_s_spread"] = [40.0, 200.0]  # of llama.cpp-q4_0
    (tmp_path / "peers.json").write_text(json.dumps(report))
    text = tables(tmp_path)
    assert "1 of 4 bars are missed." in text
    assert "no verdict: llama.cpp-q4_0 ran at 40.0 to 200.0 tokens/s |" in text


def evaluated() -> dict[str, Any]:
    def found(weights: str, size: int) -> dict[str, Any]:
        tasks = {"wikisql": {"num_texts": 9, "exact_match": 0.40912}}
        rest = {"reference_nll": 0.5, "answer_nll": 0.25, "agreement": 0.99, "identical_share": 0.5}
        return {"weights": weights, "num_bytes": size, "tasks": tasks, **rest}

    setting = {"model": "some-model", "prompts": "sql-dev.jsonl", "num_prompts": 9000, "kernels": "avx2"}
    return {"provenance": MACHINE, "setting": setting, "weights": [found("q4", 1 << 20), found("bf16", 4 << 20)]}


def test_formats_have_their_memory_and_quality_from_a_file(tmp_path: Path) -> None:
    assert formats(tmp_path) == card(tmp_path) == "No result is committed yet."
    (tmp_path / "sql.json").write_text(json.dumps(evaluated()))
    text = formats(tmp_path)
    assert "**some-model, sql-dev**: 9,000 prompts, greedy; A CPU, kernels avx2, 2 threads, commit abc." in text
    assert "| q4 | 1.0 MiB | exact match 0.4091 | 0.5000 | 0.2500 | 99.00% | 50% |" in text
    assert quality_of(tmp_path, "sql", "exact_match") == 0.40912
    assert "| sql-dev, the first 9,000 | exact match | 0.4091 | A CPU, kernels avx2" in card(tmp_path)
