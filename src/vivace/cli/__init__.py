"""The command line: one file per command, one place where errors become a line and an exit status."""

from vivace.cli.app import main

__all__ = ["main"]
