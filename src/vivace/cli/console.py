"""What goes where: results on stdout, everything about the work on stderr.

Quiet and colour are read here and nowhere else. Colour and moving progress bars appear only where stderr is a
terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Progress = Callable[[int, int], None]
"""Called with (done, in all)."""


class Console:
    """The two streams of a command."""

    def __init__(self) -> None:
        self.is_quiet = False

    def result(self, text: str, *, end: str = "\n") -> None:
        """A piece of what was asked for, at once: stdout."""
        sys.stdout.write(text + end)
        sys.stdout.flush()

    def json(self, value: Mapping[str, Any]) -> None:
        """The whole result as one JSON object: stdout."""
        self.result(json.dumps(value, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None))

    def note(self, text: str) -> None:
        """How the work goes: stderr, unless quiet."""
        if not self.is_quiet:
            print(text, file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        """Why there is no result, on one line: stderr, quiet or not."""
        print(f"error: {' '.join(text.split())}", file=sys.stderr, flush=True)

    @contextmanager
    def progress(self, what: str) -> Iterator[Progress]:
        """A bar for long work; nothing when quiet or when stderr is no terminal.

        It appears with the first report and goes when all is done, so text may stream to stdout behind it.
        """
        if self.is_quiet or not sys.stderr.isatty():
            yield lambda done, total: None
            return
        bar = _Bar(what)
        try:
            yield bar.report
        finally:
            bar.stop()

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """A table as a result: stdout; first column to the left, the others to the right."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console as RichConsole
        from rich.table import Table

        table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        width = None if sys.stdout.isatty() else 160
        RichConsole(file=sys.stdout, width=width, highlight=False).print(table)


class _Bar:
    """One bar on stderr, drawn from its first report on."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bars: Any = None

    def report(self, done: int, total: int) -> None:
        if done >= total:
            self.stop()
            return
        if self._bars is None:
            from rich.console import Console as RichConsole
            from rich.progress import Progress as RichProgress

            screen = RichConsole(stderr=True)
            self._bars = RichProgress(console=screen, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._bars.add_task(self._what)
            self._bars.start()
        self._bars.update(self._bars.task_ids[0], completed=done, total=total)

    def stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


console = Console()
"""The console of this process."""
