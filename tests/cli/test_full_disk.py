"""A full disk, command by command, on real files: one line, a status, and nothing lost or left."""

from __future__ import annotations

import errno
import operator
import os
import pydoc
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.places import Cli, files, process
from vivace.errors import VivaceError

FAILED = VivaceError.exit_code


@dataclass(frozen=True)
class Save:
    """A command that writes ``out``, and the write that finds the disk full."""

    words: Sequence[str]
    write: str
    path_at: int
    """Which of the write's arguments is the path."""
    call: int = 1
    """Which of the calls fails."""


WIDEN = ("widen", "out", "--model", "tiny")
ADAPT = ("train", "recipe.yaml", "--model", "tiny", "--data", "rows.jsonl", "--out", "out")
BEGIN = ("train", "scratch.yaml", "--data", "rows.jsonl", "--out", "out")
BENCH = ("bench", "decode", "--model", "tiny", "--methods", "plain", "--limit", "1", "--repeats", "1")
SAVE_FILE, COPY, WRITE_TEXT = "vivace.checkpoint.files.save_file", "shutil.copyfile", "pathlib.Path.write_text"
SAVES: Mapping[str, Save] = {
    "prompt files": Save(("data", "e2e", "dev.jsonl", "out"), WRITE_TEXT, 0),
    # the first text is the class of the tokenizer, in the cache folder, which costs nothing but time
    "figures of a bench": Save((*BENCH, "--max-new-tokens", "2", "--json", "out/figures.json"), WRITE_TEXT, 0, call=2),
    "weights of a twin": Save(WIDEN, SAVE_FILE, 1),
    "tokenizer of a twin": Save(WIDEN, COPY, 1, call=2),
    "adapter of a twin": Save(WIDEN, SAVE_FILE, 1, call=2),
    "snapshot of a training": Save(ADAPT, "torch.save", 1),
    "trained adapter": Save(ADAPT, SAVE_FILE, 1),
    "trained decoder": Save(BEGIN, SAVE_FILE, 1),
    "tokenizer of a trained decoder": Save(BEGIN, COPY, 1),
}


@pytest.mark.parametrize("name", SAVES)
def test_a_full_disk_is_one_line_and_loses_nothing(
    cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    save = SAVES[name]
    shutil.copytree("adapter", "tiny/adapters/multirate")
    shutil.copytree("other", "out")
    for file in ("out/e2e-dev.jsonl", "out/figures.json"):
        Path(file).write_text("old")
    before = files(place)
    fill_disk(monkeypatch, save)
    outcome = cli(*save.words, "--quiet")
    assert "No space left on device" in outcome.err
    assert "out" in outcome.err
    assert ".partial" not in outcome.err
    assert (outcome.status, outcome.err.count("\n")) == (FAILED, 1)
    after = {path: content for path, content in files(place).items() if not path.startswith("out/run")}
    assert after == before
    assert not [path for path, content in files(place).items() if "partial" in path or content == HALF]


HALF = b"half"


def fill_disk(monkeypatch: pytest.MonkeyPatch, save: Save) -> None:
    """Let one write end in the middle."""
    owner, _, function = save.write.rpartition(".")
    intact = operator.attrgetter(function)(pydoc.locate(owner))
    calls = 0

    def write(*args: Any, **settings: Any) -> Any:
        nonlocal calls
        target = args[save.path_at]
        is_ours = ".partial" in str(getattr(target, "name", target) if hasattr(target, "write") else target)
        calls += is_ours
        if not is_ours or calls != save.call:
            return intact(*args, **settings)
        target.write(HALF) if hasattr(target, "write") else Path(target).write_bytes(HALF)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(save.write, write)


def test_a_file_that_really_cannot_grow_is_one_line_and_loses_nothing(place: Path) -> None:
    """In a process of its own, whose limit ends with it; both commands in one, as it takes seconds to begin."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))"
    commands = [["--quiet", *words] for words in (WIDEN, ADAPT)]
    before = files(place)
    done = process(place, code=f"{limit}\nfrom vivace.cli.app import run; exit(sum(map(run, {commands!r})))")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2 * FAILED, "", 2), done.stderr
    assert all("out" in line for line in done.stderr.splitlines())
    left = {path for path in files(place) if path not in before}
    assert not [path for path in left if "partial" in path]
    assert {path: content for path, content in files(place).items() if path in before} == before


@pytest.mark.parametrize("command", ["decode", "beams", "palette", "parallel", "prefill"])
@pytest.mark.parametrize(("target", "why"), [("tiny", "Is a directory"), ("rows.jsonl/figures.json", "exists")])
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(
    cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch, command: str, target: str, why: str
) -> None:
    """The model is not even opened."""
    monkeypatch.setattr("vivace.load", lambda *_, **__: pytest.fail("something is measured"))
    before = files(place)
    outcome = cli("bench", command, "--json", target)
    assert (outcome.status, outcome.err.count("\n")) == (FAILED, 1)
    assert why in outcome.err
    assert target.split("/")[0] in outcome.err
    assert files(place) == before
