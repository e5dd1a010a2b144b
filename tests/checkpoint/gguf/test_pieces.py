"""Tokenizers of GGUF files give the ids of the tokenizer they were written from."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from vivace.checkpoint.gguf.header import Header
from vivace.checkpoint.gguf.pieces import write_tokenizer
from vivace.checkpoint.gguf.tokenizer_keys import PATTERNS
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.errors import CorruptError, UnsupportedError

CORPUS = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
ALPHABET = "abcxyzABC 0123456 .,;!?'\n\t-_()éßñ漢字🙂\u0301\u00a0"
SPLITS: dict[str, Any] = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    **{
        name: pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PATTERNS[pattern]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        for name, pattern in (("llama-bpe", "llama-bpe"), ("dbrx", "llama-bpe"), ("qwen2", "qwen2"))
    },
}


def texts() -> list[str]:
    rnd = random.Random(0)
    made = ["".join(rnd.choice(ALPHABET) for _ in range(rnd.randint(0, 40))) for _ in range(300)]
    return [*made, "I'LL don't we've", "  two\n\n\nlines  \t", "<|end|>text<|end|> <tool>1</tool>", "", " "]


def make_bytes(name: str) -> Tokenizer:
    """A byte-level BPE, trained on these files."""
    made = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    made.pre_tokenizer, made.decoder = SPLITS[name], decoders.ByteLevel()
    if name == "qwen2":
        made.normalizer = normalizers.NFC()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens([AddedToken("<tool>", normalized=False)])
    return made


def keys_of(made: Tokenizer, pre: str) -> dict[str, Any]:
    found = json.loads(made.to_str())
    vocabulary = made.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [3 if token == "<|end|>" else 4 if token == "<tool>" else 1 for token in tokens]
    return {
        **{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens},
        **{"tokenizer.ggml.token_type": types, "tokenizer.ggml.eos_token_id": vocabulary["<|end|>"]},
        "tokenizer.ggml.merges": [" ".join(merge) for merge in found["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": False,
    }


def write(keys: dict[str, Any], folder: Path) -> bool:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return write_tokenizer(Header(Path("m.gguf"), 3, keys, {}), folder)


@pytest.mark.parametrize("pre", list(SPLITS))
def test_bytes_are_split_and_merged_alike(pre: str, tmp_path: Path) -> None:
    made = make_bytes(pre)
    assert write(keys_of(made, pre) | {"tokenizer.chat_template": "{{ messages }}"}, tmp_path)
    found = load_tokenizer(tmp_path)
    for text in texts():
        ids = made.encode(text).ids
        assert found.encode(text) == ids, text
        assert found.spelled(ids) == made.decode(ids, skip_special_tokens=False)
    assert found.has_template
    assert found.eos_ids == (made.token_to_id("<|end|>"),)


def sentencepiece() -> tuple[dict[str, Any], list[tuple[str, float]]]:
    """A vocabulary with bytes, a piece that is searched for, and pieces that beat each other by their scores."""
    words = ["the", "he", "th", "er", "here", "▁t", "▁th", "▁the", "▁▁", "in", "ing", "▁in", "ab", "bc", "abc"]
    letters = sorted(set("abcdefghinrtxyz▁.,"))
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("  \n", 0.0, 4)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [(word, -float(rank), 1) for rank, word in enumerate(words)]
    pieces += [(letter, -100.0 - rank, 1) for rank, letter in enumerate(letters)]
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for text, _, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score, _ in pieces],
        "tokenizer.ggml.token_type": [kind for _, _, kind in pieces],
        **{"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0},
    }
    return keys, [(text, score) for text, score, kind in pieces if kind == 1]


def joined(text: str, scores: dict[str, float], spaced: bool) -> list[str]:
    """SentencePiece's BPE said plainly: join the best neighbours, the first of equals, until none make a piece."""
    parts = list(("▁" if spaced else "") + text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            break
        _, place = min(pairs)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [each for part in parts for each in ([part] if part in scores else [f"<0x{b:02X}>" for b in part.encode()])]


@pytest.mark.parametrize("spaced", [True, False])
def test_pieces_with_scores_are_joined_by_them(spaced: bool, tmp_path: Path) -> None:
    keys, pieces = sentencepiece()
    write(keys | {"tokenizer.ggml.add_space_prefix": spaced}, tmp_path)
    found, scores = load_tokenizer(tmp_path), dict(pieces)
    ids = {text: index for index, text in enumerate(keys["tokenizer.ggml.tokens"])}
    rnd = random.Random(1)
    for _ in range(300):
        text = "".join(rnd.choice("abcther in  gZé漢") for _ in range(rnd.randint(1, 24)))
        wanted = [ids[piece] for piece in joined(text, scores, spaced)]
        assert found.encode(text) == [1, *wanted], text
        assert found.decode(wanted) == text
    searched = found.encode("a  \nb", special=False)
    assert ids["  \n"] in searched


def test_tokenizers_that_are_not_known_are_refused(tmp_path: Path) -> None:
    keys = keys_of(make_bytes("gpt-2"), "gpt-2")
    for pre in ("tekken", "default", None):
        with pytest.raises(UnsupportedError, match=f"splits text by the rule {pre!r}.*known are llama-bpe, .*smollm"):
            write(keys | {"tokenizer.ggml.pre": pre}, tmp_path)
    with pytest.raises(CorruptError, match=r"has no tokenizer\.ggml\.tokens"):
        write({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}, tmp_path)
    with pytest.raises(CorruptError, match=r"has 3 of tokenizer.ggml.token_type for \d+ tokens"):
        write(keys | {"tokenizer.ggml.token_type": [1, 1, 1]}, tmp_path)
    with pytest.raises(CorruptError, match="merges of pieces that it does not have"):
        write(keys | {"tokenizer.ggml.merges": ["no such"]}, tmp_path)
    with pytest.raises(CorruptError, match="merges that are no pair"):
        write(keys | {"tokenizer.ggml.merges": ["single"]}, tmp_path)
    scored, _ = sentencepiece()
    with pytest.raises(UnsupportedError, match="normalizes text before tokenizing"):
        write(scored | {"tokenizer.ggml.remove_extra_whitespaces": True}, tmp_path)
    assert not write({"tokenizer.ggml.model": "none"}, tmp_path)
