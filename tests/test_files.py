from __future__ import annotations

from pathlib import Path

import pytest

from vivace.files import replacing, whole_lines, write_text


def test_a_finished_block_replaces_the_file(tmp_path: Path) -> None:
    write_text(tmp_path / "deep" / "a.txt", "old")
    write_text(tmp_path / "deep" / "a.txt", "new")
    assert (tmp_path / "deep" / "a.txt").read_text() == "new"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.txt"]


def test_a_failed_block_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "old")

    def fail() -> None:
        with replacing(tmp_path / "a.txt") as partial:
            partial.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fail()
    assert (tmp_path / "a.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"", ""), (b"a", ""), (b"a\n", "a\n"), (b"a\nb", "a\n"), ("é\né".encode()[:-1], "é\n"), (b"a\n\n", "a\n\n")],
)
def test_a_line_without_an_end_is_left_out(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    assert whole_lines(path) == text
