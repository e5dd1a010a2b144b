"""Tables of passes: shares and ratios are computed from what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.pass_tables import costs, engines, tables

WHOLE = "end_to_end_tokens_per_s"
MACHINE = {"cpu": "A", "num_threads": 2, "commit": "abc"}


def kernels() -> dict[str, Any]:
    seconds = {"1": 0.002, "2": 0.0022, "4": 0.0024, "8": 0.003, "16": 0.005}
    models = {"small": {"weight_bytes": 30_000_000, "seconds": seconds, "token_seconds": 0.0018}}
    return {
        "provenance": MACHINE,
        "kernels": "avx2",
        "read_bytes_per_s": {"sum": 15e9, "stream": 20e9},
        "models": models,
    }


def peers() -> dict[str, Any]:
    runs = [
        {"method": "vivace bf16", "tokens_per_s": 90.0, "tokens_per_s_spread": [80.0, 95.0], WHOLE: 50.0},
        {"method": "transformers", "tokens_per_s": 30.0, "tokens_per_s_spread": [29.0, 31.0], WHOLE: 25.0},
    ]
    passes = {"vivace bf16": {"1": 0.01, "8": 0.012}}
    model = {"weight_bytes": 2e8, "kernels": "avx2", "heat": {"dtype": "float32"}, "runs": runs, "passes": passes}
    return {"provenance": MACHINE, "models": {"100M": model}}


def test_one_row_stands_beside_memory_and_more_rows_beside_one() -> None:
    report = kernels()
    report["models"]["older"] = {k: v for k, v in report["models"]["small"].items() if k != "token_seconds"}
    assert "| small bf16 | 30.0 MB | 2.00 ms | 75% | 1.80 ms | 1.20x | 1.10 | 1.20 | 1.50 | 2.50 |" in costs(report)
    assert "| older bf16 | 30.0 MB | 2.00 ms | 75% | - | - | 1.10 | 1.20 | 1.50 | 2.50 |" in costs(report)


def test_engines_stand_beside_transformers() -> None:
    text = engines(peers())
    assert "| vivace bf16 | 90.0 | 80.0 to 95.0 | 3.00x | 2.00x | 10.00 ms | 12.00 ms |" in text
    assert "| transformers | 30.0 | 29.0 to 31.0 | 1.00x | 1.00x | - | - |" in text
    assert "transformers runs in float32" in text


def test_every_file_of_a_folder_is_there(tmp_path: Path) -> None:
    (tmp_path / "peers-b.json").write_text(json.dumps(peers()))
    (tmp_path / "kernels-b.json").write_text(json.dumps(kernels()))
    text = tables(tmp_path)
    assert text.index("### Passes: A, 2 threads, commit abc") < text.index("### Other engines: A")
    assert tables(tmp_path / "empty") == "No passes are committed yet."
