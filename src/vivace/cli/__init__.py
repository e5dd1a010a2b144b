"""The command line: one file per command, and one place where an error becomes a message and an exit status."""

from vivace.cli.app import main

__all__ = ["main"]
