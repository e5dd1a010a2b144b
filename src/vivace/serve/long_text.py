"""Turns long texts into tokens and back, in a process of its own.

A megabyte takes a second or two. Tokenizers release Python's lock meanwhile, but not while they free what they computed
besides the ids, nor while they join tokens, which stops every other thread for up to 0.2 seconds. Starting a process
for one text takes longer, but delays no other request.
"""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

from vivace.serve.api_error import APIError

LONG = 1 << 17
"""Number of characters, or of tokens, above which a text is long."""
MAX_SECONDS = 120.0
GIVES_WAY = 5
"""Nice level, as of a grammar's trial."""


def encode_apart(folder: Path, text: str, *, special: bool) -> list[int]:
    """Return what the tokenizer of a checkpoint gives for a text.

    Args:
        folder: the checkpoint.
        text: any text.
        special: with the tokenizer's own leading and trailing tokens.

    Raises:
        Refusal: the process failed, or did not come to an end in time (503).
    """
    return array("q", _apart(folder, "special" if special else "encode", text.encode())).tolist()


def decode_apart(folder: Path, tokens: Sequence[int]) -> str:
    """The text of tokens, special ones left out.

    Args:
        folder: the checkpoint.
        tokens: ids that it has.

    Raises:
        Refusal: the process failed, or did not come to an end in time (503).
    """
    return _apart(folder, "decode", array("q", tokens).tobytes()).decode()


def _apart(folder: Path, what: str, given: bytes) -> bytes:
    command = [sys.executable, "-m", "vivace.serve.long_text", str(folder), what]
    try:
        return subprocess.run(command, input=given, capture_output=True, timeout=MAX_SECONDS, check=True).stdout
    except (subprocess.SubprocessError, OSError) as exc:
        raise APIError(503, "a text this long could not be tokenized; send it in parts", code="busy") from exc


def main() -> None:
    """Read a text and write its tokens, eight bytes each, or read tokens and write their text."""
    os.nice(GIVES_WAY)
    from vivace.checkpoint.tokenizer import load_tokenizer

    folder, what = sys.argv[1:]
    tokenizer, given = load_tokenizer(folder), sys.stdin.buffer.read()
    if what == "decode":
        found = tokenizer.decode(array("q", given).tolist()).encode()
    else:
        found = array("q", tokenizer.encode(given.decode(), special=what == "special")).tobytes()
    sys.stdout.buffer.write(found)


if __name__ == "__main__":
    main()
