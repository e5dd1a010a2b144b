from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from vivace.errors import ConfigError, CorruptError, NotFoundError
from vivace.evaluate.tasks import convert
from vivace.prompts import Prompt, load_prompts

E2E = [
    {"mr": "name[Fen House], priceRange[£ 20 - 25]", "ref": "Fen House costs £ 20 - 25 ."},
    {"mr": "name[Fen House], priceRange[£ 20 - 25]", "ref": "Pay £ 20 - 25 , at Fen House ."},
    {"mr": "name[Oak Bar]", "ref": "Oak Bar ."},
]
SQL = [
    {"table_id": "1-1", "question": "Which  year?", "columns_seen": ["YEAR", "CLUB"], "sql": "SELECT YEAR FROM TABLE ;"}
]


def write(path: Path, rows: Sequence[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with (
        gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8") as stream
    ):
        stream.write(text)
    return path


def test_a_folder_gives_a_file_for_each_split(tmp_path: Path) -> None:
    write(tmp_path / "e2e" / "train.jsonl.gz", E2E)
    write(
        tmp_path / "e2e" / "dev.jsonl",
        [{"mr": "name[Oak Bar]", "ref": "Oak Bar."}, {"mr": "name[Oak Bar]", "ref": "Oak"}],
    )
    train, dev = convert("e2e", tmp_path, tmp_path / "out")
    assert (train.num_rows, train.num_references, train.was_detokenised) == (3, 3, True)
    assert (dev.num_rows, dev.num_references, dev.was_detokenised) == (1, 2, False)
    assert load_prompts(tmp_path / "out" / "e2e-train.jsonl") == [
        Prompt("Describe: name[Fen House], priceRange[£20-25]", ("Fen House costs £20-25.",), "e2e"),
        Prompt("Describe: name[Fen House], priceRange[£20-25]", ("Pay £20-25, at Fen House.",), "e2e"),
        Prompt("Describe: name[Oak Bar]", ("Oak Bar.",), "e2e"),
    ]
    assert load_prompts(tmp_path / "out" / "e2e-dev.jsonl") == [
        Prompt("Describe: name[Oak Bar]", ("Oak Bar.", "Oak"), "e2e")
    ]


def test_a_file_says_its_split_or_is_told(tmp_path: Path) -> None:
    source = write(tmp_path / "questions.jsonl", SQL)
    with pytest.raises(ConfigError, match="does not say which split"):
        convert("wikisql", source, tmp_path / "out")
    (done,) = convert("wikisql", source, tmp_path / "mine.jsonl", split="dev")
    assert done.output == tmp_path / "mine.jsonl"
    assert load_prompts(done.output) == [
        Prompt("Write SQL for: Which year? Columns: YEAR, CLUB", ("SELECT YEAR FROM TABLE ;",), "wikisql")
    ]


def test_advising_lies_beside_wikisql_and_is_not_taken_for_it(tmp_path: Path) -> None:
    """One folder holds both; the schema is the same for every question and no part of the prompt."""
    rows = [{"question": "Who teaches  Knots ?", "sql": f"SELECT {name} FROM KNOTS ;"} for name in ("A", "B")]
    write(tmp_path / "train.jsonl", SQL)
    write(tmp_path / "advising_train.jsonl.gz", rows)
    write(tmp_path / "advising_dev.jsonl", rows)
    train, dev = convert("advising", tmp_path, tmp_path / "out")
    prompt = "Write SQL for: Who teaches Knots ? Database: advising"
    assert load_prompts(tmp_path / "out" / "advising-train.jsonl") == [
        Prompt(prompt, (f"SELECT {name} FROM KNOTS ;",), "advising") for name in ("A", "B")
    ]
    assert load_prompts(dev.output) == [Prompt(prompt, ("SELECT A FROM KNOTS ;", "SELECT B FROM KNOTS ;"), "advising")]
    assert (train.num_references, dev.num_rows, dev.num_references) == (2, 1, 2)
    with pytest.raises(NotFoundError, match=r"no advising_dev.jsonl\[.gz\] in"):
        convert("advising", write(tmp_path / "other" / "dev.jsonl", rows).parent, tmp_path / "out", split="dev")


def test_wrong_questions_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "dev.jsonl", SQL)
    with pytest.raises(ConfigError, match="did you mean 'wikisql'"):
        convert("wikisq", source, tmp_path)
    with pytest.raises(ConfigError, match="no split 'test'"):
        convert("wikisql", source, tmp_path, split="test")
    with pytest.raises(NotFoundError, match=r"no train.jsonl\[.gz\] in"):
        convert("wikisql", tmp_path, tmp_path, split="train")
    write(tmp_path / "train.jsonl", SQL)
    with pytest.raises(ConfigError, match="2 splits"):
        convert("wikisql", tmp_path, tmp_path / "one.jsonl")


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"mr": "name[Oak]"}, "field 'ref' is missing"),
        ({"mr": 3, "ref": "x"}, "field 'mr'"),
        (["mr"], "not a row of e2e"),
    ],
)
def test_a_broken_row_is_named_and_nothing_is_written(tmp_path: Path, row: object, complaint: str) -> None:
    source = write(tmp_path / "dev.jsonl", [{"mr": "name[Oak]", "ref": "Oak."}, row])
    with pytest.raises(CorruptError, match=complaint) as caught:
        convert("e2e", source, tmp_path / "out")
    assert "line 2" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b'{"mr": "a", "ref": "b"}\n' * 50))
    packed[20:26] = b"\xff" * 6
    (tmp_path / "train.jsonl.gz").write_bytes(packed)
    with pytest.raises(CorruptError, match="not readable as UTF-8 text"):
        convert("e2e", tmp_path, tmp_path / "out")


def test_a_truncated_archive_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "dev.jsonl.gz", E2E * 100)
    source.write_bytes(source.read_bytes()[:-20])
    with pytest.raises(CorruptError, match=r"dev\.jsonl\.gz: not readable"):
        convert("e2e", source, tmp_path / "out")


def test_only_complete_references_are_taken_when_asked(tmp_path: Path) -> None:
    source = write(tmp_path / "train.jsonl", [*E2E, {"mr": "name[Fen House], food[French]", "ref": "Fen House ."}])
    (done,) = convert("e2e", source, tmp_path / "out.jsonl", complete=True)
    assert (done.num_rows, done.num_references) == (3, 3)
    with pytest.raises(ConfigError, match="only e2e"):
        convert("wikisql", write(tmp_path / "sql-train.jsonl", SQL), tmp_path / "out.jsonl", complete=True)
