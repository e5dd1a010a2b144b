"""Single tokens: how each is spelt, the bytes it stands for, and where it begins in its text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from vivace.checkpoint.tokenizer import TextStream, Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class TokenPiece:
    """A single token; special tokens are spelt out."""

    id: int
    text: str
    raw: bytes
    """Its bytes. A character may be spread over several tokens, whose bytes have to be joined."""


def piece(tokenizer: Tokenizer, token: int) -> TokenPiece:
    """Return the text and bytes of one token."""
    text: str = tokenizer.inner.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    raw = text.encode() if _NO_CHARACTER not in text else _bytes_of(str(tokenizer.inner.convert_ids_to_tokens(token)))
    return TokenPiece(token, text, text.encode() if raw is None else raw)


def _bytes_of(spelt: str) -> bytes | None:
    """Return the bytes of a vocabulary entry that is no text, in the two ways vocabularies spell bytes; None for
    others.
    """
    if match := _BYTE.fullmatch(spelt):
        return bytes.fromhex(match[1])
    alphabet = _byte_alphabet()
    return bytes(alphabet[char] for char in spelt) if all(char in alphabet for char in spelt) else None


@cache
def _byte_alphabet() -> Mapping[str, int]:
    """Return the characters that byte-level vocabularies write for bytes (GPT-2, Radford et al. 2019)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


class Offsets:
    """Computes where tokens begin in their text, in characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = TextStream(tokenizer)
        self._at = 0

    def push(self, pieces: Sequence[TokenPiece]) -> list[int]:
        """Return where further tokens begin; a token inside a character begins where the character does."""
        found = []
        for one in pieces:
            text = self._stream.push([one.id])  # with it may come what was held back before it
            held = len(text) - len(one.text) if text.endswith(one.text) else 0
            found.append(self._at + held)
            self._at += len(text)
        return found
