from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Outcome

Cli = Callable[..., Outcome]


def test_data_says_what_it_wrote(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "dev.jsonl").write_text('{"mr": "name[Oak]", "ref": "Oak ."}\n', encoding="utf-8")
    target = tmp_path / "out" / "e2e-dev.jsonl"
    outcome = cli("data", "e2e", tmp_path, tmp_path / "out")
    assert (outcome.status, outcome.out) == (0, f"{target}: 1 rows, 1 references, spacing restored\n")
    assert target.read_text() == '{"prompt": "Describe: name[Oak]", "reference": "Oak.", "task": "e2e"}\n'
    (file,) = cli("data", "e2e", tmp_path, tmp_path / "out", "--json").json["files"]
    assert file["num_rows"] == 1
    assert file["was_detokenised"] is True


def test_a_folder_that_cannot_be_made_is_one_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "dev.jsonl").write_text('{"mr": "name[Oak]", "ref": "Oak."}\n', encoding="utf-8")
    (tmp_path / "out").write_text("a file, not a folder")
    outcome = cli("data", "e2e", tmp_path, tmp_path / "out")
    assert outcome.status == 1
    assert outcome.err.count("\n") == 1
    assert "out" in outcome.err


def test_nothing_is_written_where_one_split_is_broken(cli: Cli, tmp_path: Path) -> None:
    row = '{"mr": "name[Oak]", "ref": "Oak."}\n'
    (tmp_path / "train.jsonl").write_text(row, encoding="utf-8")
    (tmp_path / "dev.jsonl").write_text(row + '{"mr": "name[Oak]"}\n', encoding="utf-8")
    outcome = cli("data", "e2e", tmp_path, tmp_path / "out")
    assert outcome.status == 1
    assert "dev.jsonl" in outcome.err
    assert not list(tmp_path.glob("out/*"))
