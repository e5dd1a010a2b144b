"""Long prompts from public files: what stands where, what is drawn, and what is wrong with a file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from vivace.cli.app import run
from vivace.errors import ConfigError, CorruptError, NotFoundError, VivaceError
from vivace.evaluate.long_prompts import Layout, convert_long
from vivace.prompts import load_prompts


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    rows = [
        {"question": f"who is {n}", "answers": [f"man {n}", str(n)], "ctxs": [{"title": f"T{n}", "text": f"text {n}."}]}
        for n in range(40)
    ]
    return written(tmp_path / "nq.jsonl.gz", rows)


def test_multidoc(questions: Path, tmp_path: Path) -> None:
    files = convert_long("multidoc", questions, tmp_path / "out", Layout(5, 2, 7))
    assert [(file.output.name, file.num_rows, file.num_references) for file in files] == [
        ("multidoc-train.jsonl", 32, 64),
        ("multidoc-dev.jsonl", 8, 16),
    ]
    seen = set()
    for file in files:
        is_dev = "dev" in file.output.name
        for row in load_prompts(file.output):
            number = int(row.references[1])
            lines = str(row.request).splitlines()
            documents = [line for line in lines if line.startswith("Document ")]
            assert len(documents) == 5
            assert documents[1] == f"Document 2 (T{number}): text {number}."
            numbers = [int(line.rpartition(" ")[2][:-1]) for line in documents]
            assert len(set(numbers)) == 5
            assert {n % 5 == 0 for n in numbers} == {is_dev}, "no document of the other split"
            assert lines[-2] == f"Question: who is {number}?"
            seen.add(number)
    assert len(seen) == 40
    again = convert_long("multidoc", questions, tmp_path / "again", Layout(5, 2, 7))
    other = convert_long("multidoc", questions, tmp_path / "other", Layout(5, None, 8))
    for file, same, drawn in zip(files, again, other, strict=True):
        assert file.output.read_bytes() == same.output.read_bytes() != drawn.output.read_bytes()


def test_kv_and_reading(tmp_path: Path) -> None:
    pairs = [[f"k{n}", f"v{n}"] for n in range(30)]
    kv = written(tmp_path / "kv.jsonl.gz", [{"ordered_kv_records": pairs, "key": "k3", "value": "v3"}] * 6)
    [file] = convert_long("kv", kv, tmp_path / "kv.jsonl", Layout(4, 4), "train")
    row = load_prompts(file.output)[0]
    assert '{ "k0": "v0",\n "k1": "v1",\n "k2": "v2",\n "k3": "v3"}' in str(row.request)
    assert str(row.request).endswith('Key: "k3"\nAnswer with the value.')
    assert row.references == ("v3",)
    texts = written(tmp_path / "wiki.jsonl.gz", [{"context": "Read.", "answer": "5", "aliases": ["five"]}] * 6)
    [file] = convert_long("reading", texts, tmp_path / "out.jsonl", Layout(), "dev")
    assert [(row.request, row.references) for row in load_prompts(file.output)] == [("Read.", ("5", "five"))] * 2


def test_from_the_command_line(questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "multidoc", str(questions), str(tmp_path / "out"), "--documents", "3", "--position", "3"]) == 0
    assert "multidoc-dev.jsonl: 8 rows, 16 references" in capsys.readouterr().out
    for words, message in [
        (["multidoc", "--position", "9", "--documents", "3"], "--position is 9; there are 3 documents, from 1"),
        (["multidoc", "--documents", "0"], "--documents must be at least 1"),
        (["multidoc", "--documents", "30"], "30 documents, and there are 8 in this split; ask for fewer"),
        (["reading", "--seed", "3"], "--seed has no effect on reading"),
        (["e2e", "--documents", "3"], "--documents has no effect on e2e"),
        (["kv"], "a row is not one of kv"),
        (["kv", "--complete"], "leave out --complete for kv"),
        (["multidocs"], "did you mean 'multidoc'"),
    ]:
        assert run(["data", words[0], str(questions), str(tmp_path / "other"), *words[1:]]) in (1, 2)
        assert message in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("source", "output", "kind", "message"),
    [
        ("none.jsonl", "out", NotFoundError, "no such file"),
        ("bad.jsonl", "out", CorruptError, "not readable as JSON"),
        ("empty.jsonl", "out", CorruptError, "no rows"),
        ("nq.jsonl.gz", "one.jsonl", ConfigError, "there are two splits"),
        ("nq.jsonl.gz", "nq.jsonl.gz", ConfigError, "is the source itself"),
    ],
)
def test_what_cannot_be(
    questions: Path, tmp_path: Path, source: str, output: str, kind: type[VivaceError], message: str
) -> None:
    (tmp_path / "bad.jsonl").write_text("{", encoding="utf-8")
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(kind, match=message):
        convert_long("multidoc", tmp_path / source, tmp_path / output, Layout(2))
