"""The parts of the measurement of a guard: none is left out without a word, and each table says where it is from."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import guard
from benchmarks.guard_table import guards
from benchmarks.result_files import write_report


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--parts", "overhead,scopes"), "'scopes' is none of overhead"), (("--parts", "scope"), "scope needs --data")],
)
def test_a_part_that_cannot_be_measured_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr("sys.argv", ["guard", "model", *words])
    with pytest.raises(SystemExit):
        guard.main()
    assert said in capsys.readouterr().err


def test_every_table_says_where_it_is_from(tmp_path: Path) -> None:
    figures = {"area": 0.9, "found_at_5_percent": 0.7}
    scope = {
        "rows": {"train": 40, "oos_train": 10, "val": 20, "oos_val": 10},
        "head": figures,
        "tfidf": {"best": {**figures, "grams": "word 1-1"}},
    }
    obeyed = {"as_text": 3, "as_material": 1, "as_material_behind_rules": 0}
    attacks = {"attacks": 60, "blocked": 48, "clean_blocked": 0, "clean_documents": 12, "obeyed": obeyed}
    origin = {"cpu": "A CPU", "num_threads": 2, "best_kernels": "avx512", "commit": "abc+changes"}
    write_report(
        tmp_path / "one.json",
        {"provenance": origin, "guard": {"model": "m", "injections": attacks, "scope": scope}},
    )
    text = guards(tmp_path)
    marked = "2 threads, **from a tree with uncommitted changes** on top of commit abc."
    assert f"documents without one. A CPU, kernels avx512, {marked}" in text
    assert f"A CPU, kernels torch (this processor runs avx512 as well), {marked}" in text
