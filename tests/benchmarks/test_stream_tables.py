"""Streams beside their paper: its counts and ratios, only runs of streams, and what a step of them runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stream_tables import PAPER, beside_paper, parts, shared, weights

MACHINE = {"cpu": "A CPU", "num_threads": 2, "commit": "abc+changes"}


def test_counts_are_the_papers() -> None:
    text = weights()
    assert "| 40,960 | 428,605,440 | 10,464 |" in text
    assert "| 81,920 | 591,396,864 | 7,219 |" in text
    assert "| 5,120 | 4,456,448 | 870 |" in text


def report(model: str, *, cpu: str = "A CPU") -> dict[str, Any]:
    plain = {"method": "plain", "tokens_per_target_pass": 1.0, "speedup": 1.0, "end_to_end_tokens_per_s": 10.0}
    told = {"plan": "chain 3 from kept node", "extra_bytes": 3656696, "training": {"steps": 9, "minutes": 1.0}}
    run = plain | told | {"method": "multistream", "tokens_per_target_pass": 2.5, "speedup": 1.25}
    setting = {"model": model, "prompts": "e2e", "kernels": "avx2"}
    return {"provenance": MACHINE | {"cpu": cpu}, "setting": setting, "runs": [plain, run]}


def test_streams_stand_beside_the_paper_with_their_layer_passes() -> None:
    without = report("b")
    del without["runs"][1]
    text = beside_paper([report("a"), without])
    assert "| a, e2e | lossless, `kept` | 9 steps, 1 min | 2.50 | 24 + 12 | 1.67 | 1.25x | 1.00x |" in text
    assert "| b, e2e |" not in text
    assert "`attach: kept` in every row" in text
    assert "**from a tree with uncommitted changes** on top of commit abc" in text
    assert text.count("| shared, `every` |") == len(PAPER)


def test_another_processor_is_another_table() -> None:
    text = beside_paper([report("a"), report("b", cpu="Another")])
    assert text.count("| model, prompts | mode, attach | training |") == 2
    assert text.index("**A CPU") < text.index("| a, e2e") < text.index("**Another") < text.index("| b, e2e")


def test_parts_of_streams_have_their_layer_passes_and_whole_answers(tmp_path: Path) -> None:
    plain = {"method": "plain", "end_to_end_tokens_per_s": 10.0}
    told = {"tokens_per_target_pass": 2.7, "acceptance_per_position": [0.9], "identical": True}
    speeds = {"speedup": 1.5, "speedup_interval": [1.4, 1.6], "end_to_end_tokens_per_s": 12.0}
    runs = [plain, *({"method": name, **told, **speeds} for name in ("all parts", "insertion 18"))]
    head = {"provenance": MACHINE, "kernels": "avx2", "prompts": "e2e", "num_prompts": 4, "steps": 100}
    found = {**head, "weights": {"all parts": 1234}, "variants": runs, "drafts": [plain]}
    (tmp_path / "streams.json").write_text(json.dumps(found))
    text = parts(tmp_path / "streams.json")
    assert "| all parts | 1,234 | 2.70 | 24 + 12 | 0.90 | 1.50x (1.40 to 1.60) | 1.20x | same |" in text
    assert "| insertion 18 |  | 2.70 | 24 + 6 |" in text
    assert "`attach: kept` in every row" in text
    assert "go through Python in every step" in text


def told(shared_quality: float, plain: float, kernels: str = "avx2") -> dict[str, Any]:
    streams = {"tokens_per_target_pass": 2.5, "speedup": 1.25, "identical": True}
    quality = {"shared": shared_quality, "plain": plain}
    found = {"num_prompts": 1000, "quality": quality, "ratio": [1.0, 0.9, 1.1], "streams": streams}
    return {**found, "kernels": kernels, "provenance": MACHINE}


def test_a_fine_tune_that_is_worse_than_its_start_is_said_first(tmp_path: Path) -> None:
    starts = {"a-dev": (0.5, "a file"), "b-dev": (0.4, "the log")}
    assert shared(tmp_path, starts) == "No result is committed yet."
    path = tmp_path / "some.json"
    path.write_text(json.dumps({"a-dev": told(0.45, 0.44), "b-dev": told(0.39, 0.38)}))
    text = shared(tmp_path, starts)
    assert text.startswith("**Both fine-tunes are worse than the model that they start from, on all prompts.**")
    row = "| 0.5000 (a file) | 0.4500 | 0.4400 | 1.000 (0.900 to 1.100) | 2.50 | 1.25x, same text |"
    assert f"| a-dev, 1,000 prompts {row}" in text
    path.write_text(json.dumps({"a-dev": told(0.45, 0.51), "b-dev": told(0.39, 0.38)}))
    assert "Both fine-tunes are worse" not in shared(tmp_path, starts)


def test_the_shared_modes_table_is_of_one_machine_and_knows_every_start(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text(json.dumps({"a-dev": told(0.45, 0.44), "b-dev": told(0.39, 0.38, kernels="amx")}))
    with pytest.raises(ValueError, match="over several machines"):
        shared(tmp_path, {"a-dev": (0.5, "x"), "b-dev": (0.4, "x")})
    path.write_text(json.dumps({"a-dev": told(0.45, 0.44)}))
    with pytest.raises(ValueError, match="start is not known on a-dev"):
        shared(tmp_path, {})
