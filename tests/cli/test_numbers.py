"""Numbers and lists on the command line that are none: one line, and nothing is begun."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest

from tests.cli.places import Cli
from vivace.errors import UsageError
from vivace.prompts import load_text


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("bench", "prefill", "--model", "tiny", "--lengths", "\N{SUPERSCRIPT TWO}"), "--lengths"),
        (("bench", "beams", "--batches", "\N{SUPERSCRIPT TWO}"), "--batches"),
        (("bench", "palette", "--shape", "16x16", "--bits", "9", "--rounds", "1"), "Invalid value for '--bits'"),
        (("bench", "palette", "--shape", "16x16", "--modes", ","), "--modes names none; own, hooks, plain are there"),
        (("demo", "--tasks", ","), "--tasks names none; leave it out for all that suit the model"),
        (("inspect", "adapter", "--weights", "int8"), "--weights is for a checkpoint, "),
    ],
)
def test_what_is_no_number_is_one_line(cli: Cli, place: Path, words: tuple[str, ...], complaint: str) -> None:
    outcome = cli(*words, "--quiet")
    assert complaint in outcome.err
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (UsageError.exit_code, "", 1)
    assert "not expected" not in outcome.err


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "marked.txt").write_bytes(codecs.BOM_UTF8 + b"hello")
    assert load_text(tmp_path / "marked.txt") == "hello"
