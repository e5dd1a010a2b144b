"""API keys: which characters they may have, and how they are read from a file so that no process list shows them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from vivace.errors import ConfigError

STDIN = "-"
"""Stands for standard input in place of a file."""


def check_keys(keys: Iterable[str]) -> None:
    """Refuse keys that no request could ever match; messages never show a key.

    HTTP carries ``Authorization: Bearer KEY`` as bytes without a stated encoding, clients differ in what they make of
    other characters, and blanks at its ends are dropped on the way.

    Raises:
        ConfigError: one is empty, or holds anything but visible ASCII characters.
    """
    for number, key in enumerate(keys, 1):
        if not key:
            raise ConfigError("an API key must not be empty")
        if not all("!" <= char <= "~" for char in key):
            raise ConfigError(
                f"API key {number} holds a blank or a character outside ASCII, which clients cannot send reliably; "
                "use letters, digits and punctuation"
            )


def read_keys(path: str) -> tuple[str, ...]:
    """Keys of a file, one a line; empty lines and lines that begin with ``#`` are passed over.

    Args:
        path: of the file; ``-`` reads standard input to its end.

    Raises:
        ConfigError: it cannot be read, or holds no key.
    """
    source = "standard input" if path == STDIN else path
    try:
        data = sys.stdin.buffer.read() if path == STDIN else Path(path).read_bytes()
        lines = data.decode("utf-8-sig").splitlines()
    except OSError as exc:
        raise ConfigError(f"--api-key-file {path}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"--api-key-file {path}: {source} is no text") from exc
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {path}: {source} holds no key; write one a line")
    return keys
