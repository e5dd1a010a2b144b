"""``vivace batch``: order, resuming after a kill, and what is wrong with a file."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.adapters.guard.untrusted import with_material
from vivace.batch import pool
from vivace.batch import run as runs
from vivace.batch.journal import Journal
from vivace.batch.run import answer_file, read_prompts
from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.cli.app import run
from vivace.engine import Options
from vivace.errors import BusyError, CapacityError, ConfigError, CorruptError, DecodingError, NotFoundError

LINES = [f"{'abc ' * (place * 7 % 11)}{place}" for place in range(23)]
SETTINGS: dict[str, Any] = {"max_new_tokens": 9, "num_beams": 2, "min_new_tokens": 3}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> vivace.Engine:
    return vivace.load(make_checkpoint(tmp_path_factory.mktemp("batch")))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return path


def expected(engine: vivace.Engine) -> str:
    texts = [result.text for result in engine.generate(LINES, **SETTINGS)]
    return "".join(" ".join(text.split()) + "\n" for text in texts)


@pytest.mark.parametrize("batch_tokens", [1, 300, 10**6])
def test_answers_come_in_the_order_of_the_file(engine: vivace.Engine, source: Path, batch_tokens: int) -> None:
    output = source.with_name("out.txt")
    done = answer_file(engine, source, output, Options.of(SETTINGS), num_workers=0, batch_tokens=batch_tokens)
    assert output.read_text(encoding="utf-8") == expected(engine)
    assert (done.num_prompts, done.num_answered_before) == (23, 0)
    assert sorted(path.name for path in source.parent.iterdir()) == ["in.txt", "out.txt"]


def test_processes_give_the_same_and_jsonl_has_scores(engine: vivace.Engine, source: Path) -> None:
    output = source.with_name("out.jsonl")
    options = Options.of(SETTINGS | {"num_return_sequences": 2})
    answer_file(engine, source, output, options, num_workers=2, batch_tokens=300)
    rows = [json.loads(row) for row in output.read_text(encoding="utf-8").splitlines()]
    for row, result in zip(rows, engine.generate(LINES, **SETTINGS, num_return_sequences=2), strict=True):
        assert (row["text"], row["score"]) == (result.text, result.score)
        assert row["alternatives"] == [{"text": one.text, "score": one.score} for one in result.alternatives]
    assert not multiprocessing.active_children()


def test_what_was_answered_before_a_stop_is_kept(
    engine: vivace.Engine, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, options = source.with_name("out.txt"), Options.of(SETTINGS)
    decode, turns = runs._BatchRun._decode, [0]

    def stopped(self: Any, batch: Any, texts: Any) -> None:
        turns[0] += 1
        if turns[0] == 4:
            raise KeyboardInterrupt
        decode(self, batch, texts)

    monkeypatch.setattr(runs._BatchRun, "_decode", stopped)
    with pytest.raises(KeyboardInterrupt):
        answer_file(engine, source, output, options, num_workers=0, batch_tokens=200)
    assert not output.exists()
    journal = output.with_name(".out.txt.batch")
    with journal.open("ab") as file:
        file.write(b'{"line": 3, "pro')  # cut off by a kill
    monkeypatch.setattr(runs._BatchRun, "_decode", decode)
    source.write_text("\n".join(["corrected", *LINES[1:]]) + "\n", encoding="utf-8")
    done = answer_file(engine, source, output, options, num_workers=0, batch_tokens=200)
    assert 0 < done.num_answered_before < 23
    texts = [result.text for result in engine.generate(["corrected", *LINES[1:]], **SETTINGS)]
    assert output.read_text(encoding="utf-8") == "".join(" ".join(text.split()) + "\n" for text in texts)
    assert not journal.exists()


def test_other_settings_do_not_continue_a_run(engine: vivace.Engine, source: Path) -> None:
    output = source.with_name("out.txt")
    journal = output.with_name(".out.txt.batch")
    row = {"line": 1, "prompt": "0", "answer": {"text": "kept"}}
    journal.write_text(json.dumps({"settings": {"model": "another"}}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match="was begun with other settings"):
        answer_file(engine, source, output, Options.of(SETTINGS), num_workers=0)
    journal.write_text("no journal\n")
    with pytest.raises(CorruptError, match="no journal of vivace batch"):
        answer_file(engine, source, output, Options.of(SETTINGS), num_workers=0)


def test_another_model_in_the_same_place_does_not_continue_a_run(
    engine: vivace.Engine, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError("the disk is full")

    folder, output, options = tmp_path / "model", source.with_name("out.txt"), Options.of({"max_new_tokens": 2})
    make_checkpoint(folder, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(runs, "_write", full_disk)
        with pytest.raises(OSError, match="the disk is full"):
            answer_file(vivace.load(folder), source, output, options, num_workers=0)
    shutil.rmtree(folder)
    make_checkpoint(folder, seed=2)
    with pytest.raises(ConfigError, match="or by another model"):
        answer_file(vivace.load(folder), source, output, options, num_workers=0)


def test_two_runs_do_not_write_one_journal(source: Path) -> None:
    output = source.with_name("out.txt")
    first = Journal(output, {})
    first.add(1, "a", {"text": "kept"})
    with pytest.raises(BusyError, match="is written by another run"):
        Journal(output, {})
    first.close()
    second = Journal(output, {})
    assert second.answer(1, "a") == {"text": "kept"}
    second.close(delete=True)
    assert not second.path.exists()


def test_a_run_without_answers_leaves_nothing_and_binds_nobody(engine: vivace.Engine, source: Path) -> None:
    output = source.with_name("out.txt")
    journal = output.with_name(".out.txt.batch")
    with pytest.raises(CapacityError, match="line 1"):
        answer_file(engine, source, output, Options.of({"max_new_tokens": 10**9}), num_workers=0)
    assert not journal.exists()
    journal.write_text(json.dumps({"settings": {"model": "another"}}) + "\n")
    answer_file(engine, source, output, Options.of(SETTINGS), num_workers=0)
    assert output.read_text(encoding="utf-8") == expected(engine)


def test_keys_and_values_in_other_bits_do_not_continue_a_run(
    engine: vivace.Engine, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError("the disk is full")

    words = ["batch", str(source), str(source.with_name("out.txt")), "--model", str(engine.folder), "--workers", "0"]
    words += ["--max-new-tokens", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(runs, "_write", full_disk)
        assert run(words) == 1
    assert run([*words, "--kv", "int8"]) == 2
    assert "was begun with other settings" in capsys.readouterr().err
    assert run(words) == 0


def test_another_adapter_of_a_lossy_method_does_not_continue_a_run(
    engine: vivace.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for threshold in (0.5, 0.9):
        folder = tmp_path / f"calm-{threshold}"
        save_adapter(folder, "calm", base_hash(engine.folder), {"thresholds": [threshold]}, {}, {})
        exact = runs._known_of(engine, "lookup")
        with monkeypatch.context() as patch:
            patch.setattr(engine.methods, "adapters", {"calm": folder})
            assert runs._known_of(engine, "lookup") == exact
            found.append(runs._known_of(engine, "calm"))
    assert found[0] != found[1]


def test_a_killed_process_is_an_error_and_nothing_is_lost(engine: vivace.Engine, source: Path) -> None:
    output = source.with_name("out.txt")

    def kill() -> None:
        while not (found := multiprocessing.active_children()):
            time.sleep(0.01)
        os.kill(found[0].pid or 0, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(DecodingError, match="a process that tokenizes was killed"):
        answer_file(engine, source, output, Options.of(SETTINGS), num_workers=1)
    thread.join()
    answer_file(engine, source, output, Options.of(SETTINGS), num_workers=0)
    assert output.read_text(encoding="utf-8") == expected(engine)


@pytest.mark.slow
def test_kill_9_and_the_same_command_again(engine: vivace.Engine, source: Path) -> None:
    output = source.with_name("out.txt")
    source.write_text("\n".join(LINES * 40) + "\n", encoding="utf-8")
    words = [
        "batch",
        str(source),
        str(output),
        "--model",
        str(engine.folder),
        "--num-beams",
        "2",
        "--batch-tokens",
        "200",
    ]
    words += ["--max-new-tokens", "9", "--min-new-tokens", "3", "--workers", "1"]
    command = [sys.executable, "-m", "vivace", *words]
    journal = output.with_name(".out.txt.batch")
    process = subprocess.Popen(command)
    while not (journal.is_file() and journal.read_bytes().count(b"\n") > 20):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert not output.exists()
    subprocess.run(command, check=True, timeout=300)
    assert output.read_text(encoding="utf-8") == expected(engine) * 40


def test_the_command(engine: vivace.Engine, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = source.with_name("out.txt")
    words = ["batch", str(source), str(output), "--model", str(engine.folder), "--workers", "0", "--json"]
    assert run([*words, "--num-beams", "2", "--max-new-tokens", "9", "--min-new-tokens", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["num_prompts"] == 23
    assert output.read_text(encoding="utf-8") == expected(engine)


def test_material_is_marked_as_elsewhere(engine: vivace.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody else wrote does not become the user's turn because many rows are answered at once."""
    monkeypatch.setattr(pool, "_OWN", [engine.tokenizer])
    monkeypatch.setattr(
        engine.tokenizer.inner, "chat_template", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    turns = [{"role": "user", "content": "Sum up."}, {"role": "untrusted", "content": "Say so [["}]
    [tokens] = pool._tokens([turns], raw=False)
    assert tokens == engine.tokenizer.encode_prompt(with_material(turns, engine.tokenizer))
    assert "[[material 1]]" in engine.tokenizer.decode(cast("list[int]", tokens))


@pytest.mark.parametrize("name", ["out.txt", "out.jsonl"])
def test_packed_files_have_what_plain_ones_have(engine: vivace.Engine, source: Path, name: str) -> None:
    packed = source.with_name("in.txt.gz")
    packed.write_bytes(gzip.compress(source.read_bytes()))
    assert read_prompts(packed) == LINES
    outputs = [source.with_name(name), source.with_name(f"{name}.gz")]
    for asked, output in zip([source, packed], outputs, strict=True):
        answer_file(engine, asked, output, Options.of(SETTINGS), num_workers=0)
    assert gzip.decompress(outputs[1].read_bytes()) == outputs[0].read_bytes()
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(CorruptError, match="not readable as packed text"):
        read_prompts(packed)


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    for name, content in {"in.txt": b"one\r\ntwo\r\n", "in.jsonl": b'{"prompt": "one"}\n{"prompt": "two"}\n'}.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + content))
        assert read_prompts(tmp_path / name) == read_prompts(tmp_path / f"{name}.gz") == ["one", "two"]
    (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbfa\n\xff\n")
    with pytest.raises(CorruptError, match="line 2: not UTF-8 text"):
        read_prompts(tmp_path / "in.txt")


def test_further_texts_of_a_search_need_a_file_that_holds_them(engine: vivace.Engine, source: Path) -> None:
    output, options = source.with_name("out.txt"), Options.of(SETTINGS | {"num_return_sequences": 2})
    with pytest.raises(ConfigError, match=r"num_return_sequences 2 has no place in .*out\.txt, .*name a \.jsonl file"):
        answer_file(engine, source, output, options, num_workers=0)
    assert [path.name for path in source.parent.iterdir()] == ["in.txt"]


def test_files_that_cannot_be(engine: vivace.Engine, tmp_path: Path) -> None:
    options, output = Options.of(SETTINGS), tmp_path / "out.txt"
    with pytest.raises(NotFoundError, match="no such file"):
        read_prompts(tmp_path / "none.txt")
    with pytest.raises(NotFoundError, match="is a folder; name a file of prompts"):
        read_prompts(tmp_path)
    path = tmp_path / "in.txt"
    path.write_bytes(b"one\ntwo \xff\n")
    with pytest.raises(CorruptError, match="line 2: not UTF-8 text"):
        read_prompts(path)
    path.write_text("one\n\nthree\n")
    with pytest.raises(ConfigError, match="line 2: the prompt is empty"):
        read_prompts(path)
    rows = tmp_path / "in.jsonl"
    for name in ("max_new_tokens", "length_penalty", "no_repeat_ngram_size", "num_return_sequences", "method"):
        rows.write_text(f'{{"prompt": "one", "reference": "1"}}\n{{"prompt": "two", "{name}": 3}}\n')
        with pytest.raises(ConfigError, match=f"line 2: '{name}' is a setting of the whole file"):
            read_prompts(rows)
    path.write_text("one\n" + "zq" * 500 + "\n")
    with pytest.raises(CapacityError, match=r"line 2: the prompt has \d+ tokens"):
        answer_file(engine, path, output, options, num_workers=0)
    with pytest.raises(ConfigError, match="would replace the prompts"):
        answer_file(engine, path, path, options, num_workers=0)
    with pytest.raises(ConfigError, match="is a folder; name a file for the answers"):
        answer_file(engine, path, tmp_path, options, num_workers=0)
    with pytest.raises(ConfigError, match="batch_tokens must be at least 1"):
        answer_file(engine, path, output, options, num_workers=0, batch_tokens=0)


def test_what_changes_answers_beside_the_weights_does_not_continue_a_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError("the disk is full")

    folder, options = make_checkpoint(tmp_path / "model"), Options.of({"max_new_tokens": 2})
    for name, changed in (
        ("generation_config.json", '{"eos_token_id": 0, "num_beams": 3}'),
        ("chat_template.jinja", "always the same"),
    ):
        output = source.with_name(f"{name}.txt")
        with monkeypatch.context() as patch:
            patch.setattr(runs, "_write", full_disk)
            with pytest.raises(OSError, match="the disk is full"):
                answer_file(vivace.load(folder), source, output, options, num_workers=0)
        (folder / name).write_text(changed)
        with pytest.raises(ConfigError, match="was begun with other settings"):
            answer_file(vivace.load(folder), source, output, options, num_workers=0)


def test_a_wrong_line_of_a_later_window_loses_no_answer(
    engine: vivace.Engine, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "WINDOW", 8)
    source.write_text("\n".join([*LINES[:8], "word " * 400]) + "\n", encoding="utf-8")
    output = source.with_name("out.txt")
    with pytest.raises(CapacityError, match="line 9"):
        answer_file(engine, source, output, Options.of(SETTINGS), num_workers=1, batch_tokens=200)
    journal = output.with_name(".out.txt.batch").read_text(encoding="utf-8")
    assert len(journal.splitlines()) == 1 + 8
