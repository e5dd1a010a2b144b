"""Translating ``tokenizer.json`` into the tokenizer keys of a GGUF file.

llama.cpp has two kinds of tokenizer that Llama checkpoints use: byte-level BPE ("gpt2": pieces and merges) and
SentencePiece's BPE ("llama": pieces and scores). Byte-level BPE first splits the text by a pattern, and llama.cpp has
a closed list of patterns, each with a name. If the pattern is not in the list, llama.cpp's "default" is written and
`TokenizerKeys.splits_alike` is false. So it is where a tokenizer normalizes text or adds tokens in ways that the file
has no key for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vivace.checkpoint.files import read_json
from vivace.checkpoint.gguf.file import Value
from vivace.checkpoint.tokenizer import Tokenizer, load_tokenizer
from vivace.errors import MismatchError, NotFoundError, UnsupportedError

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens."""

ENDS = ("eos", "eot", "eom")
"""Names of the tokens that end a text: that of texts, of turns and of messages."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PATTERNS: Mapping[str, str] = {"llama-bpe": _LLAMA3, "qwen2": _LLAMA3.replace("{1,3}", "")}
"""The pattern by which a byte-level tokenizer splits text, by llama.cpp's name of it."""
_NAMES = {pattern: name for name, pattern in PATTERNS.items()}


@dataclass(frozen=True)
class TokenizerKeys:
    """The tokenizer keys of a GGUF file."""

    keys: dict[str, Value]
    splits_alike: bool
    """Whether llama.cpp splits text as the checkpoint's tokenizer does."""


def tokenizer_keys(folder: Path, vocab_size: int) -> TokenizerKeys:
    """Return the tokenizer keys of a checkpoint.

    Args:
        folder: the checkpoint.
        vocab_size: V; ids that the tokenizer does not have are written as unused.

    Raises:
        NotFoundError: there is no ``tokenizer.json``.
        MismatchError: the tokenizer has more ids than the model.
        UnsupportedError: the tokenizer is not a BPE of one of the two kinds.
    """
    if not (folder / "tokenizer.json").is_file():
        raise NotFoundError(f"{folder} has no tokenizer.json, from which the GGUF file's tokenizer is written")
    found = read_json(folder / "tokenizer.json")
    bpe: Mapping[str, Any] = found.get("model") or {}
    if bpe.get("type") != "BPE":
        raise UnsupportedError(f"a tokenizer of type {bpe.get('type')} cannot be written as GGUF; only BPE can")
    added = {int(token["id"]): token for token in found.get("added_tokens") or ()}
    pieces = {int(index): piece for piece, index in bpe["vocab"].items()}
    pieces |= {index: token["content"] for index, token in added.items()}
    if max(pieces) >= vocab_size:
        raise MismatchError(f"the tokenizer has ids up to {max(pieces)}, the model knows {vocab_size} tokens")
    texts = [pieces.get(index, f"[unused{index}]") for index in range(vocab_size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]]
    is_bytes = not bpe.get("byte_fallback")
    keys: dict[str, Value] = {"tokenizer.ggml.model": "gpt2" if is_bytes else "llama"}
    splits_alike = True
    if is_bytes:
        split = _split_name(found.get("pre_tokenizer"))
        splits_alike = split is not None and _steps(found) <= ({"NFC"} if split == "qwen2" else set())
        keys["tokenizer.ggml.pre"] = split or "default"
        if merges:
            keys["tokenizer.ggml.merges"] = merges
    else:
        keys["tokenizer.ggml.scores"] = _scores(texts, merges)
        keys["tokenizer.ggml.add_space_prefix"] = _adds_space(found)
        splits_alike = _steps(found) <= {"Prepend", "Replace"}
    keys["tokenizer.ggml.tokens"] = texts
    keys["tokenizer.ggml.token_type"] = [
        _type(index, pieces, added, bpe.get("unk_token"), is_bytes) for index in range(vocab_size)
    ]
    special, are_all = _special_keys(load_tokenizer(folder))
    return TokenizerKeys(keys | special, splits_alike and are_all)


def _type(
    index: int, pieces: Mapping[int, str], added: Mapping[int, Mapping[str, Any]], unknown: str | None, is_bytes: bool
) -> int:
    """Return GGUF's type of a token."""
    piece = pieces.get(index)
    if piece is None:
        return UNUSED
    if not is_bytes and piece == unknown:
        return UNKNOWN
    if index in added:
        return CONTROL if added[index].get("special") else USER
    is_byte = not is_bytes and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
    return BYTE if is_byte else NORMAL


def _scores(texts: Sequence[str], merges: Sequence[str]) -> list[float]:
    """Return a score for each piece: minus the rank of the merge that makes it.

    llama.cpp joins the pair whose union has the highest score, which is then the pair whose merge was learnt first.
    """
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [float(-ranks.get(text, len(merges))) for text in texts]


def _steps(found: Mapping[str, Any]) -> set[str]:
    """Return the kinds of steps in which a text is normalized before it is split."""
    normalizer = found.get("normalizer")
    if normalizer is None:
        return set()
    return {each["type"] for each in normalizer.get("normalizers", [normalizer])}


def _adds_space(found: Mapping[str, Any]) -> bool:
    """Return whether a text is tokenized as if a space stood before it."""
    parts = json.dumps([found.get("normalizer"), found.get("pre_tokenizer")])
    return '"Prepend"' in parts or '"prepend_scheme": "first"' in parts or '"prepend_scheme": "always"' in parts


def _split_name(pre: Mapping[str, Any] | None) -> str | None:
    """Return llama.cpp's name for the way the text is split, None if it has none."""
    steps = [] if pre is None else pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    splits_itself, before = steps[-1].get("use_regex", True), steps[:-1]
    if splits_itself and not before:
        return "gpt-2"
    if len(before) != 1:
        return None
    (step,) = before
    if splits_itself and step["type"] == "Digits" and step.get("individual_digits"):
        return "smollm"
    if not splits_itself and step["type"] == "Split" and step.get("behavior") == "Isolated":
        return _NAMES.get(step["pattern"].get("Regex", ""))
    return None


def _special_keys(tokenizer: Tokenizer) -> tuple[dict[str, Value], bool]:
    """Return the keys for the ids of special tokens and for the chat template, and whether they say all that is added
    to a text.
    """
    inner, keys = tokenizer.inner, {}
    if len(tokenizer.eos_ids) > len(ENDS):
        raise UnsupportedError(
            f"{len(tokenizer.eos_ids)} tokens end a text of this model, and a GGUF file names {len(ENDS)} at most; "
            "take some out of eos_token_id in generation_config.json"
        )
    for name, index in zip(ENDS, tokenizer.eos_ids, strict=False):
        keys[f"tokenizer.ggml.{name}_token_id"] = index
    for name, index in (("bos", inner.bos_token_id), ("padding", inner.pad_token_id), ("unknown", inner.unk_token_id)):
        if index is not None:
            keys[f"tokenizer.ggml.{name}_token_id"] = int(index)
    plain, special = tokenizer.encode("a", special=False), tokenizer.encode("a")
    begins = len(special) > len(plain) and special[0] == inner.bos_token_id
    ends = len(special) > len(plain) + begins and special[-1] == inner.eos_token_id
    more: dict[str, Value] = {"tokenizer.ggml.add_bos_token": begins}
    if ends:
        more["tokenizer.ggml.add_eos_token"] = True
    said = [*([inner.bos_token_id] if begins else []), *plain, *([inner.eos_token_id] if ends else [])]
    if isinstance(inner.chat_template, str):
        more["tokenizer.chat_template"] = inner.chat_template
    return {**keys, **more}, list(special) == said
