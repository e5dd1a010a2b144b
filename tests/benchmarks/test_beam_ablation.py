"""The ablation of beam search: every row writes the same texts, and what it counts is what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import beam_tables
from benchmarks.beam_ablation import Part, Setting, measure, parts
from tests.test_encoder_decoders import make
from vivace.evaluate.ctranslate2 import Search

BEAMS, NEW, BATCH = 3, 6, 2
LABELS = ["transformers", "+ shared", "+ native", "+ n-gram pass", "+ pipeline", "+ el"]


def test_rows_write_the_same_and_keep_less(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "t5")
    texts = ["Describe: a pub", "name[Cotto], food[Indian]", "one more"]
    setting = Setting(texts, Search(BEAMS, NEW, 0, 1.0, 2), BATCH)
    rows = parts(str(folder), "float32", setting, 0)
    found = measure(rows, setting, 2)
    assert [one["label"] for one in found] == LABELS
    assert [one["num_different"] for one in found] == [0] * len(LABELS)
    assert any(text.strip() for text in rows[0].answer(texts)), "texts that are all empty would prove nothing"
    assert all(len(one["seconds"]) == 2 and one["ms_per_input"] > 0 for one in found)
    stock, *others, el = (one["cross_cache_bytes"] for one in found)
    longest = stock // (BATCH * BEAMS * 2 * 2 * 4 * 8 * 4)  # beams, keys and values, layers, heads, width, float32
    assert stock == BATCH * BEAMS * 2 * 2 * 4 * 8 * 4 * longest
    assert 5 < longest <= 64, "a source of one block, which has 128 entries of narrow heads and 64 states"
    assert others == [BATCH * 2 * 2 * 4 * 8 * 4 * 128] * 4
    assert el == BATCH * 64 * 32 * 4

    setting_of = {"model": "m", "dtype": "float32", "num_prompts": 3, "batch": 2, "num_beams": 3, "max_new_tokens": 6}
    setting_of |= {"no_repeat_ngram_size": 2, "workers": 0, "repeats": 2, "threads": 1, "kernels": "torch"}
    report = {"provenance": {"cpu": "a cpu", "commit": "1" * 40}, "setting": setting_of, "rows": found}
    (tmp_path / "ablation-m.json").write_text(json.dumps(report))
    shown = beam_tables.ablation(tmp_path)
    assert all(f"| {label} |" in shown for label in LABELS)
    assert "| 0 of 3 |" in shown


@pytest.mark.parametrize(("gib", "fits"), [(1, 0), (2, 2**30 // 1500), (3, 2 * 2**30 // 1500)])
def test_the_largest_batch_is_what_memory_leaves_beside_the_weights(gib: int, fits: int) -> None:
    part = Part("x", list, weight_bytes=2**30, source_bytes=1000, text_bytes=500)
    assert part.largest_batch(gib) == fits
