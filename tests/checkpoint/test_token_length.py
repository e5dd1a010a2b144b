"""How long a token may be: no text of more characters than the tokens it has times this."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.token_length import longest_token
from vivace.checkpoint.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_checkpoint(tmp_path_factory.mktemp("lengths") / "tiny"))


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("ae \n<|end>familyFriendly é→東\u0301"), max_size=60))
def test_no_text_has_fewer_tokens(tokenizer: Tokenizer, text: str) -> None:
    most = longest_token(tokenizer)
    assert most is not None
    assert len(text) <= most * len(tokenizer.encode(text))


def test_some_token_is_that_long(tokenizer: Tokenizer) -> None:
    most = longest_token(tokenizer)
    assert most in {len(tokenizer.decode([token])) for token in range(len(tokenizer.inner))} | {len("<|assistant|>")}


def made(**parts: object) -> Tokenizer:
    """A byte-level vocabulary with other parts in front of it."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Backend(models.BPE({char: place for place, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(backend, name, part)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_what_joins_characters_is_counted() -> None:
    assert longest_token(made()) == 1
    composing = made(normalizer=normalizers.NFC())
    most = longest_token(composing)
    assert most is not None
    text = "\u03b9\u0308\u0301" * 9  # three characters of which NFC makes one, which is two bytes
    assert len(text) <= most * len(composing.encode(text))


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Replace("aa", "a")])},
        {"normalizer": normalizers.NFKC()},
        {"pre_tokenizer": pre_tokenizers.WhitespaceSplit()},
        {"pre_tokenizer": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)])},
        {"model": models.BPE({"a": 0}, [])},
        {"model": models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")},
    ],
)  # fmt: skip
def test_what_drops_characters_has_no_longest_token(parts: dict[str, object]) -> None:
    assert longest_token(made(**parts)) is None


def test_a_token_that_swallows_space_has_no_length() -> None:
    tokenizer = made()
    tokenizer.inner.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert longest_token(tokenizer) is None


def test_a_tokenizer_that_cannot_be_read_has_no_length(tmp_path: Path) -> None:
    class Slow:
        eos_token_id = None

    assert longest_token(Tokenizer(Slow())) is None
