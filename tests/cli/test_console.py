from __future__ import annotations

import io
import sys

import pytest

from vivace.cli.console import Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_for(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """stderr as a terminal; called in the test, as pytest sets stderr anew after its fixtures."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    return screen


def test_a_bar_appears_with_the_first_report_and_goes_when_all_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_for(monkeypatch)
    stdout = sys.stdout
    with Console().progress("reading") as progress:
        assert terminal.getvalue() == ""
        progress(1, 4)
        assert sys.stdout is stdout
        progress(4, 4)
        drawn = terminal.getvalue()
        assert "reading" in drawn
        assert drawn.endswith("\x1b[2K")  # the line is erased
        terminal.write("next")
    assert terminal.getvalue().endswith("next")


def test_a_bar_goes_when_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_for(monkeypatch)

    def work() -> None:
        with Console().progress("reading") as progress:
            progress(1, 4)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        work()
    assert terminal.getvalue().endswith("\x1b[2K")


def test_no_bar_when_quiet_or_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_for(monkeypatch)
    quiet = Console()
    quiet.is_quiet = True
    with quiet.progress("reading") as progress:
        progress(1, 4)
    assert terminal.getvalue() == ""
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    with Console().progress("reading") as progress:
        progress(1, 4)
    assert terminal.getvalue() == ""


def test_results_and_notes_have_their_streams(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.result("answer")
    console.note("work")
    console.error("two\n lines")
    console.json({"é": 1})
    assert capsys.readouterr() == ('answer\n{"é": 1}\n', "work\nerror: two lines\n")
