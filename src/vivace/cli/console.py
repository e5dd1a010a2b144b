"""Output of the commands: results go to stdout, everything about the work to stderr.

Whether to be quiet and whether to use colour is decided in this module only. Colour and moving progress bars appear
only if stderr is a terminal.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Progress = Callable[[int, int], None]
"""Callback that takes the amount done and the total amount."""


class _Notes(logging.Handler):
    """Shows log records as notes."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        """Show the message of a log record as a note."""
        self._show(record.getMessage())


class Console:
    """Writes to the two output streams of a command."""

    def __init__(self) -> None:
        self.is_quiet = False
        """Whether notes and progress are left out."""

    def result(self, text: str, *, end: str = "\n") -> None:
        """Write a part of the result to stdout and flush it."""
        sys.stdout.write(text + end)
        sys.stdout.flush()

    def json(self, value: Mapping[str, Any]) -> None:
        """Write the whole result to stdout as one JSON object, with escapes where its encoding does not have all."""
        takes_all = (sys.stdout.encoding or "utf-8").lower().replace("-", "").startswith("utf")
        self.result(json.dumps(value, ensure_ascii=not takes_all, indent=2 if sys.stdout.isatty() else None))

    def note(self, text: str) -> None:
        """Write a line about the work to stderr, unless quiet."""
        if not self.is_quiet:
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def says_what_takes_long(self) -> Iterator[None]:
        """Write as notes what ``core`` logs of work that takes seconds; callers of the library have it in the log."""
        log, shown = logging.getLogger("vivace.core"), _Notes(self.note)
        before = log.level, log.propagate
        log.addHandler(shown)
        log.setLevel(logging.INFO)
        log.propagate = False
        try:
            yield
        finally:
            log.removeHandler(shown)
            log.setLevel(before[0])
            log.propagate = before[1]

    def error(self, text: str) -> None:
        """Write the reason why there is no result to stderr, on one line, quiet or not."""
        print(f"error: {' '.join(text.split())}", file=sys.stderr, flush=True)

    @contextmanager
    def progress(self, what: str) -> Iterator[Progress]:
        """Yield a callback that shows a progress bar; it does nothing when quiet or when stderr is not a terminal.

        The bar appears with the first report and disappears when all is done, so that text can stream to stdout
        afterwards.
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
        """Write a table to stdout; the first column is aligned to the left, the others to the right.

        Where stdout is no terminal, a table is as wide as what stands in it, so that long names cost no column.
        """
        from rich.box import SIMPLE_HEAD
        from rich.console import Console as RichConsole
        from rich.table import Table

        table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        width = None if sys.stdout.isatty() else max(160, RichConsole(width=10_000).measure(table).maximum)
        RichConsole(file=sys.stdout, width=width, highlight=False).print(table)


class _Bar:
    """A progress bar on stderr that appears with its first report."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bars: Any = None

    def report(self, done: int, total: int) -> None:
        """Show how much is done; the bar disappears when it is everything."""
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
        """Remove the bar from the screen."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


console = Console()
"""The console of this process."""
