"""A tokenizer of one's own: pieces, round trips, and what transformers reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Pieces

from vivace.checkpoint.bpe import SPECIAL, save_bpe, spelling, train_bpe
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.errors import ConfigError

TEXTS = [
    "Describe: name[Fen House], area[riverside], near[The Old Weir]",
    "Fen House stands by the riverside, near The Old Weir.",
    "Write SQL for: Who scored most in round 12? Columns: PLAYER, ROUND, GOALS_SCORED",
    'SELECT PLAYER FROM TABLE WHERE ROUND = 12 AND TEAM = "The Old Weir" ;',
] * 5


@pytest.fixture(scope="module")
def pieces() -> Pieces:
    return train_bpe(TEXTS, 420)


def test_a_word_has_the_same_inner_pieces_with_and_without_its_space(pieces: Pieces) -> None:
    for word in ("Weir", "House", "riverside", "Wolverhampton", "x12y", "Zebulon"):
        bare = pieces.encode(word).tokens
        spaced = pieces.encode(" " + word).tokens
        assert "".join(spaced) == "Ġ" + "".join(bare)
        assert spaced[-len(bare) + 1 :] == bare[1:] or len(bare) == 1
        assert spaced in ([f"Ġ{bare[0]}", *bare[1:]], ["Ġ", *bare])


def test_frequent_words_are_one_piece_with_their_space() -> None:
    roomy = train_bpe(TEXTS, 1000)
    for word in (" near", " House", " the", "_SCORED"):
        assert roomy.encode(word).tokens == [word.replace(" ", "Ġ")]


def test_the_vocabulary_has_the_size_asked_for_and_the_special_ids_come_first(pieces: Pieces) -> None:
    assert pieces.get_vocab_size() <= 420
    assert [pieces.token_to_id(token) for token in SPECIAL] == [0, 1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_any_text_comes_back(pieces: Pieces, text: str) -> None:
    if not any(token in text for token in SPECIAL):
        assert pieces.decode(pieces.encode(text).ids) == text


def test_transformers_reads_it_with_its_template(pieces: Pieces, tmp_path: Path) -> None:
    save_bpe(pieces, tmp_path / "m", 512)
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 0}))
    tokenizer = load_tokenizer(tmp_path / "m")
    ids = tokenizer.encode_prompt("near The Old Weir")
    assert ids == [1, *pieces.encode("near The Old Weir").ids, 2]
    assert tokenizer.eos_ids == (0,)
    assert tokenizer.inner.pad_token_id == 3
    assert tokenizer.decode(ids) == "near The Old Weir"


def test_spelling_names_what_pieces_share() -> None:
    assert spelling("ĠThe") == ("Ġ", "the", "title")
    assert spelling("_TEAM") == ("_", "team", "upper")
    assert spelling("the") == ("", "the", "lower")
    assert spelling("Ġ") == ("", "ġ", "none") or spelling("Ġ")[0] == ""
    assert spelling("<|end|>")[0] == ""


@pytest.mark.parametrize(("texts", "size"), [(TEXTS, 200), ([], 400)])
def test_what_cannot_be_learnt_is_refused(texts: list[str], size: int) -> None:
    with pytest.raises(ConfigError):
        train_bpe(texts, size)
