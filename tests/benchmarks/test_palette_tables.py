"""Tables of palettes are filled from what the benchmarks write."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import palette_tables
from benchmarks.result_files import NO_RUN

MACHINE = {"cpu": "a processor", "best_kernels": "avx512", "commit": "abc", "num_threads": 2}


def test_bits_stand_beside_what_is_lost(tmp_path: Path) -> None:
    assert palette_tables.quality(tmp_path) == NO_RUN
    way = {"folder": "rtn", "matrix_bits": 3.25, "all_bits": 3.6, "predicted": None, "kl": 0.08, "loss": 1.5}
    right = {"accuracy": 0.6, "perplexity": 9.0, "task": "piqa", "num_rows": 200}
    right |= {"by_byte_change": {"estimate": -0.1, "low": -0.16, "high": -0.02}}
    text = {"accuracy": None, "perplexity": 21.0, "task": "wiki", "num_rows": 20, "by_byte_change": None}
    judged = {"judgements": [right, text], "mean_accuracy": 0.6, "stored_accuracy": 0.7}
    judged |= {"stored_perplexity": {"piqa": 8.0, "wiki": 18.0}}
    setting = {"model": "m", "tokens": 16384, "data": ["a.jsonl"]}
    ways = {"rtn": way | {"stored_loss": 1.25}, "gptq": way | judged | {"stored_loss": 1.25, "kl": 0.02}}
    (tmp_path / "one.json").write_text(json.dumps({"provenance": MACHINE, "setting": setting, "ways": ways}))
    written = palette_tables.quality(tmp_path)
    assert "rounded on 16,384 tokens of a.jsonl" in written
    assert "| rtn | 3.25 | 3.60 | 0.0800 | +0.2500 |  |  |  |  |" in written
    assert "| gptq | 3.25 | 3.60 | 0.0200 | +0.2500 | 60.0%, 70.0% (-16.0 to -2.0) | 21.0, 18.0 |  |  |" in written


def test_what_is_won_back_stands_beside_what_was_lost(tmp_path: Path) -> None:
    """Of 1 nat and 10 points that k-means has lost, an adapter wins back four fifths and half."""

    def way(nll: float, share: float, kl: float | None) -> dict[str, object]:
        bits = {"matrix_bits": 3.25, "all_bits": 3.6, "kl": kl, "loss": kl, "stored_loss": 1.0}
        text = {"accuracy": None, "perplexity": 9.0, "nll": nll, "task": "wiki", "num_rows": 5, "by_byte_change": None}
        choice = {"accuracy": share, "perplexity": 9.0, "nll": 2.0, "task": "piqa", "num_rows": 7}
        choice |= {"by_byte_change": {"estimate": share - 0.7, "low": share - 0.8, "high": share - 0.6}}
        other = choice | {
            "task": "arc",
            "by_byte_change": {"estimate": share - 0.7, "low": share - 0.7, "high": share - 0.7},
        }
        judged = {"judgements": [choice, other, text], "mean_accuracy": share, "stored_accuracy": 0.7}
        stored = {"piqa": 2.0, "wiki": 3.0}
        return bits | judged | {"stored_perplexity": stored, "stored_nll": stored}

    setting = {"model": "m", "tokens": 4096, "data": ["a.txt"]}
    ways = {"k-means, weighted": way(4.0, 0.6, 0.9), "gptq + recovery": way(3.2, 0.65, None)}
    (tmp_path / "one.json").write_text(json.dumps({"provenance": MACHINE, "setting": setting, "ways": ways}))
    written = palette_tables.quality(tmp_path)
    assert "| gptq + recovery | 3.25 | 3.60 |  |  | 65.0%, 70.0% (-10.0 to +0.0) | 9.0, 3.0 | 80% | 50% |" in written
    assert (
        "| k-means, weighted | 3.25 | 3.60 | 0.9000 | -0.1000 | 60.0%, 70.0% (-15.0 to -5.0) | 9.0, 3.0 | 0% | 0% |"
        in written
    )
    assert "Judged on rows of piqa (7), arc (7), wiki (5)" in written


def test_passes_stand_beside_those_of_q4(tmp_path: Path) -> None:
    path = tmp_path / "palettes.json"
    assert palette_tables.kernels(path) == NO_RUN
    formats = {
        "q4": {"weight_bytes": 65e6, "seconds": {"1": 0.010, "8": 0.020}},
        "lut3": {"weight_bytes": 53e6, "seconds": {"1": 0.008, "8": 0.030}},
    }
    found = {"provenance": MACHINE, "kernels": "avx512", "threads": 2, "models": {"100M": formats}}
    path.write_text(json.dumps(found))
    assert "| `lut3` | 53 MB | 8.00, 0.80x | 30.00, 1.50x |" in palette_tables.kernels(path)


def test_a_clustered_step_stands_beside_a_plain_one(tmp_path: Path) -> None:
    """Peaks and seconds have factors; a single step, which allocates as well, says so."""
    assert palette_tables.steps(tmp_path) == NO_RUN
    setting = {"model": "100M", "tokens": 512, "bits": 3, "steps": 1, "layers": 12, "threads": 1}
    found = {"plain": {"peak_bytes": 2 << 30, "seconds": 10.0}, "clustered": {"peak_bytes": 3 << 30, "seconds": 14.0}}
    path = tmp_path / "step-100M.json"
    path.write_text(json.dumps({"provenance": MACHINE, "setting": setting, "steps": found}))
    assert "| clustered | 3.0 GiB, 1.50x | 14.0 s, 1.40x |" in palette_tables.steps(tmp_path)
    path.write_text(json.dumps({"provenance": MACHINE, "setting": setting | {"steps": 0}, "steps": found}))
    assert "| 14.0 s, 1.40x (one step, with all that a first one allocates) |" in palette_tables.steps(tmp_path)
