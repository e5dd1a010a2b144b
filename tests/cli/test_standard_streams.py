"""Bytes on standard input that are no text, and outputs that cannot spell what is written."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from vivace.cli.app import main
from vivace.errors import UsageError


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_bytes_on_standard_input_that_are_no_text_are_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], errors: str
) -> None:
    """How a process reads such bytes depends on the locale; what is said of them does not."""

    def told(*words: str, stdin: bytes) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8", errors=errors))
        with pytest.raises(SystemExit) as end:
            main(words)
        return int(end.value.code or 0), *capsys.readouterr()

    status, out, err = told("generate", "--model", "tiny", "-", "--quiet", stdin=b"bad \xff byte")
    assert r"error: the text is not valid Unicode: there is '\udcff' after '<|user|>bad '" in err
    assert (status, out, err.count("\n")) == (UsageError.exit_code, "", 1)
    status, _, err = told("chat", "--model", "tiny", "--max-new-tokens", "4", stdin=b"bad \xff byte\n/\xff\nHi\n")
    assert status == 0
    assert err.count("that line is not valid Unicode; nothing was sent") == 2
    found = re.findall(r"(?<![\d.])4 tokens", err)  # and not 10.4 tokens/s
    assert len(found) == 1, "the next line is answered"


def test_what_an_output_cannot_spell_is_escaped(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is written to its end, and a result in JSON has all of it."""

    def written(*words: str, encoding: str) -> str:
        raw = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding=encoding))
        with pytest.raises(SystemExit) as end:
            main(words)
        assert not end.value.code
        return raw.getvalue().decode(encoding)

    words = ("inspect", "caf\u00e9", "--json")
    Path("caf\u00e9").symlink_to("tiny")
    facts = json.loads(written(*words, encoding="ascii"))
    assert json.loads(written(*words, encoding="utf-8")) == facts
    assert "caf\u00e9" in json.dumps(facts, ensure_ascii=False)
    assert r"caf\xe9" in written("inspect", "caf\u00e9", encoding="ascii")
