"""Text in, text out, text in pieces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from vivace.checkpoint.tokenizer import Tokenizer, find_tokenizer, load_tokenizer, require_same_pieces
from vivace.errors import CorruptError, MismatchError, NotFoundError, UnsupportedError

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if m['role'] == 'system' %}"
    "{{ raise_exception('no system') }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]


def byte_level(extra: tuple[str, ...] = ()) -> transformers.PreTrainedTokenizerFast:
    """One token per byte, so every other character is spread over several."""
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *extra]
    inner = Inner(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    return fast


def byte_fallback() -> transformers.PreTrainedTokenizerFast:
    """As Llama 2 spells what it does not know: spaces are pieces' own, bytes are tokens."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "b"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    inner = Inner(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


KINDS = {"byte level": Tokenizer(byte_level()), "byte fallback": Tokenizer(byte_fallback())}
TEXTS = ["plain words", "naïve café", "日本語 and 한국어", "🙂👩‍👩‍👧 family", " a a  a", "a\n\n a b", "", "e\u0301"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_text_join(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    pieces = [stream.push([index]) for index in ids]
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert stream.finish() == ""
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 258), max_size=30), st.lists(st.integers(1, 5), min_size=1))
def test_any_ids_in_any_groups(ids: list[int], groups: list[int]) -> None:
    """Whole characters and stray bytes: what was shown, joined, is the text."""
    tokenizer = KINDS["byte level"]
    stream, shown, at = tokenizer.stream(), "", 0
    while at < len(ids):
        count = groups[at % len(groups)]
        shown += stream.push(ids[at : at + count])
        at += count
    assert shown + stream.finish() == tokenizer.decode(ids)


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    tokenizer = KINDS["byte level"]
    stream = tokenizer.stream()
    ids = tokenizer.encode("ab🙂")[:-2]
    assert "".join(stream.push([index]) for index in ids) == "ab"
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_bytes_that_never_become_a_character_do_not_hold_text_for_ever() -> None:
    tokenizer = KINDS["byte level"]
    stream = tokenizer.stream()
    stray = tokenizer.encode("é")[1]
    shown = [stream.push([stray]) for _ in range(40)]
    assert any(shown)


def test_special_tokens_are_not_text() -> None:
    tokenizer = KINDS["byte level"]
    assert tokenizer.decode([*tokenizer.encode("hi"), 0, 1]) == "hi"


def chatty() -> Tokenizer:
    inner = byte_level()
    inner.chat_template = TEMPLATE
    return Tokenizer(inner)


def test_prompts_go_through_the_template() -> None:
    tokenizer = chatty()
    ids = tokenizer.encode_prompt("hi")
    assert ids == tokenizer.encode_prompt([{"role": "user", "content": "hi"}])
    assert tokenizer.inner.decode(ids) == "<|user|>hi<|assistant|>"
    assert tokenizer.encode_prompt("hi", raw=True) == tokenizer.encode("hi")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.prompt_text(turns, add_generation_prompt=False) == "<|user|>a<|assistant|>b"


def test_without_a_template() -> None:
    tokenizer = KINDS["byte level"]
    assert tokenizer.encode_prompt("hi") == tokenizer.encode("hi")
    with pytest.raises(UnsupportedError, match="no chat template; give a plain prompt"):
        tokenizer.encode_prompt([{"role": "user", "content": "hi"}])


def test_a_template_that_rejects() -> None:
    with pytest.raises(UnsupportedError, match="rejects these messages: no system"):
        chatty().encode_prompt([{"role": "system", "content": "be brief"}])


def test_end_of_text_ids() -> None:
    assert Tokenizer(byte_level()).eos_ids == (0,)
    assert Tokenizer(byte_level(), [4, 5]).eos_ids == (4, 5)


def test_loading(tmp_path: Path) -> None:
    chatty().inner.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    loaded = load_tokenizer(tmp_path)
    assert loaded.eos_ids == (2, 0)
    assert loaded.encode_prompt("é") == chatty().encode_prompt("é")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": "?"}))
    with pytest.raises(CorruptError, match="cannot be read") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(NotFoundError, match="has no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("family", "name"), [("t5", "spiece.model"), ("mbart", "sentencepiece.bpe.model"), ("marian", "source.spm")]
)
def test_a_tokenizer_that_cannot_be_opened_is_not_taken_for_none(tmp_path: Path, family: str, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    (tmp_path / name).write_bytes(b"no model")
    with pytest.raises(CorruptError, match=r"the tokenizer of .* cannot be read"):
        find_tokenizer(tmp_path)


def test_tokenizers_are_compared_by_content() -> None:
    plain, padded = Tokenizer(byte_level()), Tokenizer(byte_level(("<pad0>", "<pad1>")))
    require_same_pieces(plain, Tokenizer(byte_level()))
    require_same_pieces(plain, padded)
    require_same_pieces(padded, plain)
    with pytest.raises(MismatchError, match=r"differ in \d+ of 259 common ids \(0: '<\|end\|>' / '<unk>'"):
        require_same_pieces(plain, KINDS["byte fallback"])


def test_a_text_longer_than_the_model_reads_has_no_warning_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """Plain text to round a model by is as long as a book, and divided; transformers would warn of errors to come."""
    inner = byte_level()
    inner.model_max_length = 8
    with caplog.at_level("WARNING"):
        transformers.logging.enable_propagation()
        try:
            assert len(Tokenizer(inner).encode("a word or two", special=False)) == 13
        finally:
            transformers.logging.disable_propagation()
    assert caplog.records == []
