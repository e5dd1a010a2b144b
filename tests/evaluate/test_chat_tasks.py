"""Public instruction sets become prompt files; a row that is wrong is named, and nothing is written then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.evaluate.test_tasks import write
from vivace.errors import ConfigError, CorruptError, NotFoundError
from vivace.evaluate.chat_tasks import CHAT_TASKS, DEV_EVERY, convert_chat
from vivace.prompts import Prompt, load_prompts

ROWS: dict[str, tuple[str, dict[str, Any], Prompt]] = {
    "alpaca": (
        "alpaca/alpaca_train.jsonl.gz",
        {"instruction": "Sort.", "input": "3 1", "output": "1 3"},
        Prompt("Sort.\n\n3 1", ("1 3",), "alpaca"),
    ),
    "dolly": (
        "databricks-dolly-15k.jsonl",
        {"instruction": "Sort.", "context": "", "response": "1 3", "category": "qa"},
        Prompt("Sort.", ("1 3",), "dolly"),
    ),
    "gsm8k": (
        "train.jsonl",
        {"question": "2+2?", "answer": "It is <<2+2=4>>4.\n#### 4"},
        Prompt("2+2?", ("It is 4.\n#### 4",), "gsm8k"),
    ),
    "dialogsum": (
        "dialogsum/dev.jsonl",
        {"dialogue": "#A#: Hi", "summary1": "A greets.", "summary2": "A says hi.", "summary3": "A greets."},
        Prompt("Summarize this dialogue.\n\n#A#: Hi", ("A greets.", "A says hi."), "dialogsum"),
    ),
    "mt_bench": (
        "question.jsonl",
        {"question_id": 1, "category": "writing", "turns": ["Write.", "Again."]},
        Prompt("Write.", (), "mt_bench"),
    ),
    "snips": (
        "snips/train_full.jsonl.gz",
        {
            "intent": "PlayMusic",
            "text": "play  Ode and Für Elise ",
            "data": [
                {"text": "play  "},
                {"text": "Ode", "entity": "track"},
                {"text": " and "},
                {"text": "Für Elise ", "entity": "track"},
            ],
        },
        Prompt(
            "Intent and slots as JSON: play Ode and Für Elise",
            ('{"intent": "PlayMusic", "slots": {"track": ["Ode", "Für Elise"]}}',),
            "snips",
        ),
    ),
    "clinc": (
        "clinc/val.jsonl.gz",
        {"text": "say it in Greek", "intent": "translate"},
        Prompt("Intent: say it in Greek", ("translate",), "clinc"),
    ),
}


@pytest.mark.parametrize("task", CHAT_TASKS)
def test_a_row_becomes_a_prompt_and_its_answers(tmp_path: Path, task: str) -> None:
    file, row, prompt = ROWS[task]
    write(tmp_path / "in" / file, [row] * (2 * DEV_EVERY))
    found = convert_chat(task, tmp_path / "in", tmp_path / "out")
    rows = [each for one in found for each in load_prompts(one.output)]
    assert rows == [prompt] * (2 * DEV_EVERY)
    assert sum(one.num_rows for one in found) == 2 * DEV_EVERY


def test_a_set_in_one_file_is_divided_and_no_row_is_in_both(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(25)]
    train, dev = convert_chat("gsm8k", write(tmp_path / "train.jsonl", rows), tmp_path / "out")
    first, second = ([row.request for row in load_prompts(one.output)] for one in (train, dev))
    assert second == ["9?", "19?"]
    assert sorted([*first, *second]) == sorted(row["question"] for row in rows)


def test_reference_answers_make_conversations_of_both_turns(tmp_path: Path) -> None:
    write(tmp_path / "question.jsonl", [ROWS["mt_bench"][1], {**ROWS["mt_bench"][1], "question_id": 2}])
    write(tmp_path / "reference_gpt4.jsonl", [{"question_id": 2, "choices": [{"turns": ["Once.", "Twice."]}]}])
    [found] = convert_chat("mt_bench", tmp_path, tmp_path / "out")
    alone, both = load_prompts(found.output)
    assert alone.request == "Write."
    roles = [("user", "Write."), ("assistant", "Once."), ("user", "Again.")]
    assert both == Prompt([{"role": role, "content": text} for role, text in roles], ("Twice.",), "mt_bench")


def test_rows_without_an_answer_are_left_out(tmp_path: Path) -> None:
    rows = [{"instruction": "Sort.", "input": "", "output": text} for text in ("", "1", " ")]
    [found] = convert_chat("alpaca", write(tmp_path / "alpaca_train.jsonl", rows), tmp_path / "out.jsonl", "train")
    assert found.num_rows == 1


@pytest.mark.parametrize(
    ("task", "row", "reason"),
    [
        ("alpaca", {"instruction": "", "output": "x"}, "'instruction' is empty"),
        ("alpaca", {"instruction": "x"}, "'output' is missing"),
        ("gsm8k", {"question": 7, "answer": "x"}, "'question' is not text"),
        ("dialogsum", {"dialogue": "x"}, "'summary' is missing"),
        ("mt_bench", {"turns": []}, "'turns' is missing"),
        ("mt_bench", ["turns"], "not a JSON object"),
        ("snips", {"intent": "PlayMusic", "data": "play"}, "'data' is missing or not a list of pieces"),
        ("snips", {"intent": "PlayMusic", "data": [{"text": " "}]}, "'data' has no text"),
        ("snips", {"intent": "PlayMusic", "data": [{"text": "play", "entity": " "}]}, "'entity' is empty"),
        ("snips", {"data": [{"text": "play"}]}, "'intent' is missing"),
        ("clinc", {"text": "hi"}, "'intent' is missing"),
    ],
)
def test_a_wrong_row_is_named_and_nothing_is_written(tmp_path: Path, task: str, row: object, reason: str) -> None:
    file, good, _ = ROWS[task]
    write(tmp_path / "in" / file, [good, row])
    with pytest.raises(CorruptError, match=f"line 2: not a row of {task} .*{reason}"):
        convert_chat(task, tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_split_without_rows_is_refused(tmp_path: Path) -> None:
    row = {"instruction": "Say it.", "context": "", "response": "It."}
    (tmp_path / "dolly.jsonl").write_text((json.dumps(row) + "\n") * 5)
    with pytest.raises(ConfigError, match="has no rows of the split dev"):
        convert_chat("dolly", tmp_path / "dolly.jsonl", tmp_path / "out", split="dev")


def test_what_is_asked_wrongly_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "train.jsonl", [ROWS["gsm8k"][1]] * DEV_EVERY)
    with pytest.raises(ConfigError, match="no task 'gsm8'"):
        convert_chat("gsm8", source, tmp_path / "out")
    with pytest.raises(ConfigError, match="name a folder"):
        convert_chat("gsm8k", source, tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="the source itself"):
        convert_chat("gsm8k", source, source, "train")
    with pytest.raises(ConfigError, match="no split train; it has dev"):
        convert_chat("mt_bench", write(tmp_path / "question.jsonl", [ROWS["mt_bench"][1]]), tmp_path / "out", "train")
    with pytest.raises(NotFoundError, match=r"no train.jsonl\[.gz\]"):
        convert_chat("gsm8k", tmp_path / "none", tmp_path / "out")
    with pytest.raises(CorruptError, match="no rows"):
        convert_chat("gsm8k", write(tmp_path / "train" / "train.jsonl", []), tmp_path / "out")
