"""A result file is read as it was written, and the order of names is the order of tables."""

from __future__ import annotations

from pathlib import Path

from benchmarks.result_files import NO_RUN, read_named, tables_of, write_report


def test_reports_are_written_into_a_new_folder_and_read_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "new"
    for name in ("step-b", "step-a", "other"):
        write_report(folder / f"{name}.json", {"name": name})
    assert (folder / "other.json").read_text(encoding="utf-8") == '{\n "name": "other"\n}\n'
    assert [stem for stem, _ in read_named(folder)] == ["other", "step-a", "step-b"]
    assert list(read_named(folder, "step-*.json")) == [("step-a", {"name": "step-a"}), ("step-b", {"name": "step-b"})]
    assert tables_of(folder, lambda report: [report["name"], "-"]) == "other\n\n-\n\nstep-a\n\n-\n\nstep-b\n\n-"


def test_a_folder_without_results_says_so(tmp_path: Path) -> None:
    assert tables_of(tmp_path / "none", lambda report: [report["name"]]) == NO_RUN
