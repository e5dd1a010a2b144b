"""Conversations to learn answering from: every document once a time, each asked about, and only half of the rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks import readers
from vivace.prompts import load_prompts


def rows(count: int) -> list[dict[str, Any]]:
    documents = [{"title": f"T{at}", "text": f"{at} is it {at}."} for at in range(count)]
    return [
        {"question": f"who is {at}", "answers": [f"it {at}"], "ctxs": [document]}
        for at, document in enumerate(documents)
    ]


def test_every_question_is_asked_once_about_documents_that_stand_before_it() -> None:
    asked = []
    for turns in readers.conversations(rows(40), Random(1)):
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
        first, *later = (turn["content"] for turn in turns[::2])
        assert first.count("Document ") == len(turns) // 2
        assert not any("Document " in question for question in later)
        for question, answer in zip((first, *later), (turn["content"] for turn in turns[1::2]), strict=True):
            name = answer.removeprefix("it ")
            assert f"Question: who is {name}?\nAnswer the question" in question
            assert f"(T{name}): {name} is {answer}." in first
            asked.append(int(name))
    assert sorted(asked) == list(range(40))


def test_half_of_the_rows_is_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "talks.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows(20)))
    monkeypatch.setattr(sys, "argv", ["readers", "talks", str(out), str(source)])
    readers.main()
    text = out.read_text()
    for at in range(20):
        assert text.count(f"who is {at}?") == (0 if at % 2 else readers.TIMES)
    assert len(load_prompts(out)) == len(text.splitlines())


def test_lessons_are_of_all_kinds_in_turns_and_of_half_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, texts, out = tmp_path / "rows.jsonl", tmp_path / "texts.jsonl", tmp_path / "lessons.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows(20)))
    texts.write_text("".join(json.dumps({"context": f"text {at}?", "answer": f"a{at}"}) + "\n" for at in range(6)))
    sets = (f"nq=multidoc:{source}:3:5", f"long=reading:{texts}:1:9")
    monkeypatch.setattr(sys, "argv", ["readers", "lessons", str(out), *(f"--set={each}" for each in sets)])
    readers.main()
    written = load_prompts(out)
    assert [prompt.task for prompt in written] == ["multidoc", "reading"] * 3 + ["multidoc"] * 2
    assert sorted(p.references[0] for p in written if p.task == "reading") == ["a0", "a2", "a4"]
    for prompt in written[::2][:3]:
        assert str(prompt.request).count("Document ") == 3
        assert not any(f"(T{at})" in str(prompt.request) for at in range(1, 20, 2))


def test_some_questions_stand_in_front_of_their_documents(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows(20)))
    sets = [readers.QuestionSet.of(f"nq=multidoc:{source}:3:6")]
    plain, some = readers.lessons(sets), readers.lessons(sets, front=3)
    for at, (before, after) in enumerate(zip(plain, some, strict=True), 1):
        asked = str(after.request)
        assert sorted(asked.split("\n")) == sorted(str(before.request).split("\n"))
        assert asked.startswith("Question: who is ") == (at % 3 == 0)
        assert asked.endswith("Answer the question in a few words, from the documents.")
        assert after.references == before.references
