"""Tables of runs on a GPU say how many prompts stood beside transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_tables import tables
from benchmarks.result_files import write_report


@pytest.mark.parametrize(("count", "said"), [(1, "one prompt of a category"), (3, "3 prompts of a category")])
def test_prompts_that_transformers_answered_are_counted(tmp_path: Path, count: int, said: str) -> None:
    run = {"method": "plain", "tokens_per_s": 100.0, "speedup": 1.0, "num_different": 0}
    part: dict[str, Any] = {"category": "code", "batch": 1, "prompt_tokens": 40.0, "runs": [run]}
    packages = {"torch": "2", "transformers": "5"}
    write_report(
        tmp_path / "one.json",
        {
            "model": "m",
            "provenance": {"cpu": "A CPU", "device": "a GPU", "packages": packages, "commit": "abc"},
            "tokens": 8,
            "bytes_per_s": 1e12,
            "pass_bytes": 1e8,
            "report": [part | {"num_prompts": 10}],
            "beside": [part | {"num_prompts": count}],
        },
    )
    assert said in tables(tmp_path)
