"""Tables of drafts on chat: a caption that says what was drafted and where, means over categories, tokens a pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.chat_tables import beside_others, regimes, tables
from benchmarks.decode_tables import Result

MACHINE = {"cpu": "A", "num_threads": 2, "commit": "abc"}


def run(method: str, speedup: float, different: int = 0) -> dict[str, Any]:
    return {
        **{"method": method, "tokens_per_s": 100 * speedup, "speedup": speedup, "speedup_interval": [1.0, 2.0]},
        **{"end_to_end_speedup": speedup - 0.1, "num_different": different, "tokens_per_target_pass": 3.0},
    }


def test_a_file_is_a_caption_and_two_tables(tmp_path: Path) -> None:
    assert tables(tmp_path) == "No run is committed yet."
    plan = {"widths": [1, 1, 1], "min_confidence": 0.3, "vocabulary": 16384, "weights": "q4"}
    report = [
        {
            **{"category": category, "temperature": 0.0, "num_prompts": 8, "batch": 1, "prompt_tokens": 40.0},
            **{"others_cpu_share": 0.01, "runs": [run("plain", 1.0), run("quantized", gain, 1)]},
        }
        for category, gain in (("code", 1.4), ("documents", 1.6))
    ]
    written = {"provenance": MACHINE, "kernels": "avx512", "threads": 2, "model": "m", "tokens": 64}
    written |= {"adapters": {"quantized": plan}, "report": report}
    (tmp_path / "greedy.json").write_text(json.dumps(written))
    text = tables(tmp_path)
    assert "**m**, greedy, batch 1, 8 prompts of each category, up to 64 tokens (`greedy.json`)" in text
    assert "quantized: up to 3 guesses while sure of 0.3 from 16,384 tokens, q4" in text
    assert "2 texts differ from plain decoding's" in text
    assert "`auto`" not in text
    assert "| code (40 tokens) | 100/s | 1.40x (1.00 to 2.00) |" in text
    assert "| **mean** |  | **1.50x** |" in text
    assert "| mean of whole answers |  | 1.40x |" in text
    assert "| documents | 3.00 |" in text


def test_other_programs_stand_beside_plain_decoding() -> None:
    setting = {"model": "m", "weights": "bf16", "num_prompts": 12, "max_new_tokens": 64, "repeats": 2}
    setting |= {"kernels": "avx512", "others_cpu_share": 0.01}
    runs = [
        {**run("plain", 1.0), "first_token_ms": 20.0, "identical": False},
        {**run("quantized", 1.5), "first_token_ms": 21.0, "identical": True},
        {**run("other", 0.7, 3), "first_token_ms": None, "identical": False, "tokens_per_target_pass": None},
    ]
    held = {"plain": {"weights": 2**20, "drafter": 0}, "quantized": {"weights": 2**20, "drafter": 2**21}}
    text = beside_others([Result("found", MACHINE, {}, setting, runs, memory={"held": held})])
    assert "**m**, weights as stored, 12 packaged prompts, up to 64 tokens, 2 repeats in turns (`found.json`)" in text
    assert "| `plain` | 100 | 1.00x | 20.0 ms | 0.90x | 3.00 | 1 MiB | - |" in text
    assert "| `quantized` | 150 | 1.50x (1.00 to 2.00) | 21.0 ms | 1.40x | 3.00 | 3 MiB | same |" in text
    assert "| `other` | 70 | 0.70x (1.00 to 2.00) | - | 0.60x | - | - | 3 differ |" in text
    assert beside_others([]) == "No run is committed yet."


def test_auto_stands_beside_the_best_of_each_regime(tmp_path: Path) -> None:
    assert regimes(tmp_path) == "No run is committed yet."
    report = [
        {
            **{"temperature": temperature, "batch": batch, "threads": 2, "prompt_tokens": 40.0},
            **{"others_cpu_share": 0.0, "runs": [run("plain", 1.0), run("lookup", best), run("auto", auto)]},
        }
        for temperature, batch, best, auto in ((0.0, 1, 1.5, 1.47), (0.7, 4, 0.8, 0.9))
    ]
    written = {"provenance": MACHINE, "kernels": "avx512", "model": "m", "tokens": 64, "top_p": 0.95, "report": report}
    (tmp_path / "found.json").write_text(json.dumps(written))
    (tmp_path / "later.json").write_text(json.dumps({**written, "remembered": True}))
    text = regimes(tmp_path)
    assert "(`found.json`), drawn with top-p 0.95; `auto`: it has measured nothing before." in text
    assert "(`later.json`), drawn with top-p 0.95; `auto`: it has a run behind it." in text
    assert "| batch 1, greedy, prompts of 40 tokens, 2 threads | 100/s | 1.50x | 1.47x | 0.98 |" in text
    assert "| batch 4, temperature 0.7, prompts of 40 tokens, 2 threads | 100/s | 0.80x | 0.90x | 0.90 |" in text
    assert "within 5 % of the best fixed method in 1 of 2 cells, at least .97x of plain in 1; lowest 0.90" in text
