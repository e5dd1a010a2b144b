"""The tokenizer of a GGUF file as a ``tokenizer.json``.

Two kinds are read: byte-level BPE (``tokenizer.ggml.model`` "gpt2": pieces and merges), and SentencePiece's BPE
("llama": pieces and scores). How a byte-level tokenizer splits text before merging is only named in the file
(``tokenizer.ggml.pre``), so a name that is not known here is refused: another split would give other tokens without
any sign of it.

SentencePiece joins the pair of neighbours whose union has the best score (Kudo and Richardson 2018, arXiv:1808.06226),
which is BPE whose merges are all ways of putting a piece together from two others, in the order of scores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Pieces

from vivace.checkpoint.gguf.header import Header
from vivace.checkpoint.gguf.tokenizer_keys import BYTE, CONTROL, NORMAL, PATTERNS, UNKNOWN, USER
from vivace.errors import CorruptError, UnsupportedError

SPLITS: Mapping[str, str] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx"), "llama-bpe"),
    **dict.fromkeys(("gpt-2", "gpt2"), "gpt-2"),
    **{"qwen2": "qwen2", "smollm": "smollm"},
}
"""Splits that are read, by the names that files have for them."""
_IGNORES_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3"})
"""Names with which a word that is a piece itself is taken whole, although no merges make it."""
_BEGINS = _IGNORES_MERGES
"""Names with which texts begin with the token for that unless the file says otherwise."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's spelling of a space."""


def write_tokenizer(header: Header, folder: Path) -> bool:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and the chat template of a file.

    Args:
        header: the file's header.
        folder: where to write them.

    Returns:
        Whether the file has a tokenizer.

    Raises:
        UnsupportedError: it is of a kind, or splits text in a way, that is not read.
        CorruptError: parts of it are missing.
    """
    kind = header.keys.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return False
    read = {"gpt2": _byte_level, "llama": _sentencepiece}.get(kind)
    if read is None:
        raise UnsupportedError(
            f"{header.path} has a tokenizer of the kind {kind!r}, which is not read; read are gpt2 (byte-level BPE) "
            "and llama (SentencePiece's BPE)"
        )
    keys = _Keys(header)
    pieces = read(keys)
    pieces.add_special_tokens(keys.added(CONTROL, UNKNOWN))
    pieces.add_tokens(keys.added(USER))
    begins = kind == "llama" or header.keys.get("tokenizer.ggml.pre") in _BEGINS
    _frame(pieces, keys, begins=begins)
    named = {name: keys.special(name) for name in ("bos", "eos", "unk", "pad")}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": piece for name, piece in named.items() if piece is not None},
    }
    (folder / "tokenizer.json").write_text(pieces.to_str(pretty=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    template = header.keys.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return True


class _Keys:
    """The tokenizer keys of a file."""

    def __init__(self, header: Header) -> None:
        self.path = header.path
        self._keys = header.keys
        self.texts: Sequence[str] = self._list("tokens")
        self.types: Sequence[int] = self._list("token_type", len(self.texts))
        self.vocabulary = {text: index for index, text in enumerate(self.texts)}

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or the default if there is none."""
        return self._keys.get(f"tokenizer.ggml.{name}", default)

    def scores(self) -> Sequence[float]:
        """Return the score of each piece."""
        return self._list("scores", len(self.texts))

    def special(self, name: str) -> str | None:
        """Return the piece of "bos", "eos", "unk" or "pad", None if there is none."""
        index = self.get({"unk": "unknown", "pad": "padding"}.get(name, name) + "_token_id")
        return self.texts[index] if index is not None and 0 <= index < len(self.texts) else None

    def added(self, *types: int) -> list[AddedToken]:
        """Return the pieces of some types, which are found in a text before it is split."""
        return [AddedToken(text, special=USER not in types, normalized=False) for text in self.pieces(*types) if text]

    def pieces(self, *types: int) -> list[str]:
        """Return the pieces of some types."""
        return [text for text, kind in zip(self.texts, self.types, strict=True) if kind in types]

    def _list(self, name: str, count: int | None = None) -> Sequence[Any]:
        values = self.get(name)
        if not isinstance(values, list) or (count is not None and len(values) != count):
            found = f"{len(values)} of" if isinstance(values, list) else "no"
            wanted = "" if count is None else f" for {count} tokens"
            raise CorruptError(f"{self.path} has {found} tokenizer.ggml.{name}{wanted}; the file is incomplete")
        return values


def _byte_level(keys: _Keys) -> Pieces:
    """Return a byte-level BPE without its special tokens."""
    written = keys.get("pre")
    split = SPLITS.get(str(written))
    if split is None:
        raise UnsupportedError(
            f"{keys.path} splits text by the rule {written!r} (tokenizer.ggml.pre), which is not known here, and "
            f"another rule would give other tokens; known are {', '.join(SPLITS)}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in keys.get("merges", [])]
    if any(len(merge) != 2 for merge in merges):
        raise CorruptError(f"{keys.path} has merges that are no pair of pieces; the file is damaged")
    try:
        model = models.BPE(vocab=keys.vocabulary, merges=merges, ignore_merges=written in _IGNORES_MERGES)
    except Exception as exc:  # the tokenizers library raises bare Exception
        raise CorruptError(f"{keys.path} has merges of pieces that it does not have: {exc}") from exc
    pieces = Pieces(model)
    pieces.decoder = decoders.ByteLevel()
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in ("gpt-2", "smollm"))
    if split == "gpt-2":
        pieces.pre_tokenizer = bytes_only
        return pieces
    first = (
        pre_tokenizers.Digits(individual_digits=True)
        if split == "smollm"
        else pre_tokenizers.Split(Regex(PATTERNS[split]), "isolated")
    )
    pieces.pre_tokenizer = pre_tokenizers.Sequence([first, bytes_only])
    if split == "qwen2":
        pieces.normalizer = normalizers.NFC()  # as the published tokenizers of Qwen have it
    return pieces


def _sentencepiece(keys: _Keys) -> Pieces:
    """Return SentencePiece's BPE without its special tokens."""
    for name in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if keys.get(name):
            raise UnsupportedError(f"{keys.path} normalizes text before tokenizing ({name}), which is not supported")
    scores, vocabulary = keys.scores(), keys.vocabulary
    merges: list[tuple[float, int, int, str, str]] = []
    for index, (piece, kind) in enumerate(zip(keys.texts, keys.types, strict=True)):
        if kind != NORMAL:  # nobody puts the others together: texts are searched for them, or bytes stand for them
            continue
        for middle in range(1, len(piece)):
            first, second = vocabulary.get(piece[:middle]), vocabulary.get(piece[middle:])
            if first is not None and second is not None:
                merges.append((-scores[index], first, second, piece[:middle], piece[middle:]))
    merges.sort()
    joined = [(first, second) for *_, first, second in merges]
    unknown = keys.special("unk") or next(iter(keys.pieces(UNKNOWN)), None)
    can_spell = BYTE in keys.types
    pieces = Pieces(
        models.BPE(vocab=vocabulary, merges=joined, unk_token=unknown, fuse_unk=True, byte_fallback=can_spell)
    )
    adds_space = bool(keys.get("add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    pieces.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if adds_space else spaces
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    pieces.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * adds_space)
    return pieces


def _frame(pieces: Pieces, keys: _Keys, *, begins: bool) -> None:
    """Let texts begin and end with the tokens for that, as the file says."""
    bos = keys.special("bos") if keys.get("add_bos_token", begins) else None
    eos = keys.special("eos") if keys.get("add_eos_token", False) else None
    special = [(piece, keys.vocabulary[piece]) for piece in (bos, eos) if piece is not None]
    if special:
        single, second = ([part for part in (bos, text, eos) if part is not None] for text in ("$A", "$B"))
        both = single + [f"{part}:1" for part in second]
        pieces.post_processor = processors.TemplateProcessing(single=single, pair=both, special_tokens=special)
