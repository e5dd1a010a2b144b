"""The longest text that one token can stand for, read from a tokenizer's own description.

A text with more characters than this length times the number of tokens in a context cannot fit, so it can be refused
without tokenizing it. That holds only if no character is dropped and none are joined before the vocabulary is looked
up. Therefore every step of the description is checked, and a step that is not known to keep all characters means that
there is no such length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vivace.checkpoint.tokenizer import Tokenizer

_KEEPS = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts", "FixedLength"})
"""Ways to divide a text that keep every character, unless their behaviour is ``Removed``."""
_JOINS: Mapping[str, int] = {"Prepend": 1, "ByteLevel": 1, "NFD": 1, "NFC": 4}
"""Ways to rewrite a text, with the number of characters that may become one: NFC's compositions have four at most."""


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Return the largest number of characters that can become one token; None if there is no bound or it is not
    known.
    """
    from tokenizers import pre_tokenizers

    backend = getattr(tokenizer.inner, "backend_tokenizer", None)
    if backend is None:
        return None
    said = json.loads(backend.to_str())
    model = said["model"]
    dividers, writers = _steps(said["pre_tokenizer"]), _steps(said["normalizer"])
    if any(one["type"] not in _KEEPS or one.get("behavior") == "Removed" for one in dividers):
        return None
    vocab = tokenizer.inner.get_vocab()
    if model.get("byte_fallback"):
        spelt = {f"<0x{byte:02X}>" for byte in range(256)}
    elif any(one["type"] == "ByteLevel" for one in [*dividers, *writers]):
        spelt = set(pre_tokenizers.ByteLevel.alphabet())
    else:
        return None
    # what a vocabulary cannot spell is dropped, or becomes one token however long it is
    if model["type"] not in ("BPE", "Unigram") or not spelt <= vocab.keys():
        return None
    if any(one["lstrip"] or one["rstrip"] for one in said["added_tokens"]):  # swallows the space around it
        return None
    joined = 1
    for one in writers:
        if one["type"] == "Replace":
            if len(one["pattern"].get("String", "")) != 1 or not one["content"]:
                return None
        elif one["type"] in _JOINS:
            joined *= _JOINS[one["type"]]
        else:
            return None
    return joined * max(map(len, vocab))


def _steps(said: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the steps of a part of the description, nested sequences flattened."""
    if said is None:
        return []
    if said["type"] != "Sequence":
        return [said]
    return [step for part in said.get("pretokenizers", said.get("normalizers", ())) for step in _steps(part)]
