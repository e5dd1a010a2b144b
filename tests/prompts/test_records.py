from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from vivace.errors import ConfigError, CorruptError, NotFoundError
from vivace.prompts import TASKS, Prompt, load_prompts, packaged_prompts, save_prompts

CHAT = [{"role": "user", "content": "Hi"}]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    prompts = [Prompt("Hi"), Prompt("Caf\u00e9", ("a", "b"), "e2e"), Prompt("x", ("one",)), Prompt(list(CHAT), ("y",))]
    prompts.append(Prompt([3, 1, 4]))
    assert save_prompts(tmp_path / "deep" / "p.jsonl", prompts) == 5
    assert load_prompts(tmp_path / "deep" / "p.jsonl") == prompts
    rows = [json.loads(line) for line in (tmp_path / "deep" / "p.jsonl").read_text("utf-8").splitlines()]
    assert rows[2] == {"prompt": "x", "reference": "one"}
    assert rows[3] == {"messages": CHAT, "reference": "y"}
    assert rows[4] == {"prompt": [3, 1, 4]}


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_what_only_python_takes_for_the_end_of_a_line(tmp_path: Path, end: str) -> None:
    prompts = [Prompt(f"one{end}two", (f"a{end}b",)), Prompt("three")]
    save_prompts(tmp_path / "p.jsonl", prompts)
    assert load_prompts(tmp_path / "p.jsonl") == prompts


def test_gzip_blank_lines_and_foreign_keys_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress(b'\n{"prompt": "Hi", "id": 7}\n\n'))
    assert load_prompts(path) == [Prompt("Hi")]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON (Expecting property name enclosed in double quotes at column 2)"),
        pytest.param("[" * 100_000, "not JSON that can be read (lists or objects lie too deep", id="deep"),
        ('["Hi"]', "expected a JSON object, found a list of string"),
        ('{"text": "Hi"}', 'expected "prompt" or "messages", found neither'),
        ('{"prompt": "Hi", "messages": []}', 'expected "prompt" or "messages", found both'),
        ('{"prompt": 3}', '"prompt" is a string or a list of token ids, found a number'),
        ('{"prompt": "  "}', '"prompt" is empty'),
        ('{"prompts": "Hi"}', "unknown key 'prompts'; did you mean 'prompt'?"),
        ('{"prompt": "Hi", "references": []}', "unknown key 'references'; did you mean 'reference'?"),
        ('{"prompt": "Hi", "reference": 3}', '"reference" is a string or a list of strings, found a number'),
        ('{"prompt": "Hi", "reference": ["a", 3]}', "found a list of number and string"),
        ('{"prompt": [3, -1]}', '"prompt" is a string or a list of token ids, found a list of number'),
        ('{"prompt": []}', '"prompt" is a string or a list of token ids, found an empty list'),
        ('{"prompt": [true]}', '"prompt" is a string or a list of token ids, found a list of boolean'),
        ('{"prompt": "Hi", "task": 3}', '"task" is a string, found a number'),
        ('{"messages": []}', '"messages" is a list of at least one turn, found an empty list'),
        (
            '{"messages": [{"role": "user"}]}',
            '"messages"[0] is {"role": str, "content": str}, found an object with \'role\'',
        ),
        ('{"messages": [{"role": "user", "content": null}]}', '"messages"[0]'),
    ],
)
def test_each_kind_of_broken_row_is_one_clear_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "Hi"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_prompts(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b'{"prompt": "Hi"}\n' * 50))
    packed[20:26] = b"\xff" * 6
    (tmp_path / "p.jsonl.gz").write_bytes(packed)
    with pytest.raises(CorruptError, match="not readable as UTF-8 text"):
        load_prompts(tmp_path / "p.jsonl.gz")


def test_files_that_are_no_prompt_files(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        load_prompts(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(CorruptError, match="no rows"):
        load_prompts(tmp_path / "empty.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(CorruptError, match="not readable as UTF-8"):
        load_prompts(tmp_path / "bytes.jsonl")
    with pytest.raises(ConfigError, match="did you mean 'sql'"):
        packaged_prompts("sqll")


def test_the_chat_set_is_short_and_has_no_references() -> None:
    prompts = packaged_prompts("chat")
    assert len({str(prompt.request) for prompt in prompts}) == len(prompts) == 24
    assert not any(prompt.references or prompt.task for prompt in prompts)


@pytest.mark.parametrize("name", TASKS)
def test_packaged_sets_hold_a_hundred_distinct_prompts(name: str) -> None:
    prompts = packaged_prompts(name)
    assert len({prompt.request for prompt in prompts if isinstance(prompt.request, str)}) == 100
    start = {"e2e": "Describe: name[", "sql": "Write SQL for: "}[name]
    assert all(str(prompt.request).startswith(start) for prompt in prompts)
    assert all(prompt.task == {"e2e": "e2e", "sql": "wikisql"}[name] for prompt in prompts)


def test_packaged_sets_are_what_the_generator_draws(tmp_path: Path) -> None:
    tool = Path(__file__).resolve().parents[2] / "tools" / "make_prompts.py"
    spec = importlib.util.spec_from_file_location("make_prompts", tool)
    assert spec is not None
    assert spec.loader is not None
    make_prompts = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = make_prompts
    spec.loader.exec_module(make_prompts)
    make_prompts.FOLDER = tmp_path
    make_prompts.main()
    for name in TASKS:
        assert load_prompts(tmp_path / f"{name}.jsonl") == packaged_prompts(name)
