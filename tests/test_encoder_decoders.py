"""Encoder-decoder checkpoints through the engine and the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, BartConfig, BartForConditionalGeneration, T5Config
from transformers import T5ForConditionalGeneration as T5

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.cli.app import run
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.errors import CapacityError, ConfigError, UnsupportedError, UsageError

SOURCES = ["the quick brown fox", "a", "name[Cotto], food[Indian], area[riverside]", "aaaa bbbb"]
SEARCH: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 16, "length_penalty": 2.0}


def make(folder: Path, kind: str) -> Path:
    """A random model with the tokenizer of the tiny Llama."""
    make_checkpoint(folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    (folder / "model.safetensors").unlink()
    torch.manual_seed(1)
    ends = {"eos_token_id": 0, "pad_token_id": 1, "bos_token_id": None, "decoder_start_token_id": 1}
    if kind == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        model = T5(T5Config(vocab_size=size, **sizes, **ends, feed_forward_proj="gated-gelu"))
    else:
        stacks = {f"{side}_{name}": value for side in ("encoder", "decoder")
                  for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
        model = BartForConditionalGeneration(
            BartConfig(vocab_size=size, d_model=32, max_position_embeddings=64, **stacks, **ends)
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    settings = {"decoder_start_token_id": 1, "eos_token_id": 0, "pad_token_id": 1}
    if kind == "bart":
        settings |= {"num_beams": 3, "min_length": 5, "no_repeat_ngram_size": 2, "forced_eos_token_id": 0}
        settings |= {"forced_bos_token_id": 9, "bad_words_ids": [[7]], "early_stopping": True}
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": None})
    )
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module", params=["t5", "bart"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def engine(folder: Path) -> vivace.Engine:
    return vivace.load(folder)


@pytest.mark.parametrize("asked", [{"max_new_tokens": 12}, SEARCH, {"num_beams": 1, "max_new_tokens": 12}], ids=str)
def test_texts_are_those_of_transformers(engine: vivace.Engine, folder: Path, asked: dict[str, Any]) -> None:
    theirs = AutoModelForSeq2SeqLM.from_pretrained(folder)
    for source, result in zip(SOURCES, engine.generate(SOURCES, **asked), strict=True):
        ids = torch.tensor([engine.tokenizer.encode(source)])
        usual = theirs.generate(ids, **asked, do_sample=False, return_dict_in_generate=True, output_scores=True)
        found = [result, *result.alternatives]
        for row, one in zip(usual.sequences[:, 1:].tolist(), found, strict=True):
            assert tuple(row[: len(one.token_ids)]) == one.token_ids
            assert set(row[len(one.token_ids) :]) <= {0, 1}
        if result.score is not None:
            assert [one.score for one in found] == pytest.approx(usual.sequences_scores.tolist(), abs=1e-5)


def test_a_source_has_the_same_bits_alone_and_among_others(engine: vivace.Engine) -> None:
    together = engine.generate(SOURCES * 4, batch_size=16, **SEARCH)
    for source, result in zip(SOURCES, together, strict=False):
        alone = engine.generate(source, **SEARCH)[0]
        assert (alone.token_ids, alone.score, alone.alternatives) == (
            result.token_ids,
            result.score,
            result.alternatives,
        )
        streamed = list(engine.stream(source, **SEARCH))
        assert "".join(chunk.text for chunk in streamed) == result.text


def test_a_source_is_stored_once_whatever_the_beams(engine: vivace.Engine) -> None:
    taken = []
    for beams in (2, 8):
        asked = vivace.engine.Options.of({"num_beams": beams, "max_new_tokens": 8})
        request = engine.request(SOURCES[2], asked)
        session = engine.session([request], asked)
        session.admit(request)
        session.step()
        assert session.cache.beside is not None
        taken.append(session.cache.beside.nbytes)
        assert session.cache.beside.lengths == [len(request.source)]
        session.close()
        assert session.cache.beside.nbytes == 0
    assert taken[0] == taken[1] == engine.model.source_bytes(len(request.source))


def test_where_memory_ends_a_text_is_read_again_with_its_source(engine: vivace.Engine) -> None:
    asked = vivace.engine.Options.of({"num_beams": 1, "max_new_tokens": 300, "ignore_eos": True})
    limit = engine.model.config.max_positions
    settings = {"num_beams": 1, "max_new_tokens": min(300, limit - 2), "ignore_eos": True}
    usual = [result.token_ids for result in engine.generate(SOURCES, **settings)]
    scarce = vivace.load(engine.folder, memory=engine.num_bytes * 2 + 6 * engine.model.slot_bytes(400))
    assert [result.token_ids for result in scarce.generate(SOURCES, **settings)] == usual
    assert asked.num_beams == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "lookup"}, "method lookup drafts for decoders without an encoder"),
        ({"prefill": "lexical"}, "an encoder reads its whole source"),
        ({"forced_bos_token_id": 10**6}, "forced_bos_token_id is 1000000; this model has no such token"),
        ({"forced_bos_token_id": "xx_Unknown"}, "forced_bos_token_id is 'xx_Unknown'"),
        ({"max_new_tokens": 10**6}, "the context holds"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_line(engine: vivace.Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine.generate("a", **options)


def test_sources_that_cannot_be(engine: vivace.Engine) -> None:
    with pytest.raises(ConfigError, match="the prompt is empty"):
        engine.generate("")
    if engine.model.config.positions == "learned":
        with pytest.raises(CapacityError, match=r"the source has \d+ tokens; the encoder of this model holds 64"):
            engine.generate("zq" * 300)
    with pytest.raises(UnsupportedError, match="logits of a text depend on its source"):
        engine.logits([[1, 2]])
    session = Session(engine.model, num_slots=1, capacity=32)
    with pytest.raises(ConfigError, match="this model reads a source beside its text"):
        session.admit(Request((1,), 4, engine.methods.drafter("plain")))


def test_a_first_token_can_be_named_as_it_is_spelt(engine: vivace.Engine) -> None:
    piece = engine.tokenizer.inner.convert_ids_to_tokens(40)
    for asked in (40, piece):
        assert engine.generate("a", max_new_tokens=4, forced_bos_token_id=asked)[0].token_ids[0] == 40


def test_generate_runs_it_and_other_commands_refuse_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "the quick fox", "--model", str(folder), "--max-new-tokens", "9"]
    status: Callable[..., int] = run
    assert status([*words, "--num-beams", "2", "--forced-bos-token-id", "40", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["token_ids"][0] == 40
    for refused in (["check", str(folder)], ["chat", "--model", str(folder)]):
        assert status([*refused]) != 0
        assert "encoder-decoder model" in capsys.readouterr().err


def test_a_checkpoint_must_say_how_texts_begin(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    with pytest.raises(ConfigError, match="names no decoder_start_token_id"):
        vivace.load(tmp_path).generate("a")
    (tmp_path / "generation_config.json").unlink()
    assert vivace.load(tmp_path).generate("a", max_new_tokens=3), "old checkpoints have it in config.json"
    (tmp_path / "generation_config.json").write_text(json.dumps({"bad_words_ids": [[1, 2]]}))
    with pytest.raises(UnsupportedError, match="bad_words_ids of several tokens"):
        vivace.load(tmp_path)


@pytest.mark.parametrize("kind", ["t5", "bart"])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_sources_that_do_not_fit_together_wait_for_each_other(kind: str, num_beams: int, tmp_path: Path) -> None:
    folder = make(tmp_path / kind, kind)
    sources = [list(range(5, 19 + 4 * place)) for place in range(12)]
    how: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "do_sample": False, "num_beams": num_beams}
    free = vivace.load(folder, attention="shared")
    wanted = [answer.token_ids for answer in free.generate(sources, **how)]
    alone = vivace.load(folder, attention="shared")
    alone.generate(sources[-1], **how)
    room = 2 * alone.memory.most_taken_bytes
    assert room < free.memory.most_taken_bytes, "they do not all fit"
    tight = vivace.load(folder, attention="shared", memory=free.memory.held_bytes + room)
    assert [answer.token_ids for answer in tight.generate(sources, **how)] == wanted


def test_texts_that_the_checkpoint_returns_are_all_printed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    settings = json.loads((folder / "generation_config.json").read_text()) | {"num_beams": 3, "num_return_sequences": 2}
    (tmp_path / "copy" / "generation_config.json").write_text(json.dumps(settings))
    wanted = vivace.load(tmp_path / "copy").generate(SOURCES[0], max_new_tokens=6)[0]
    assert run(["generate", "--model", str(tmp_path / "copy"), "--max-new-tokens", "6", SOURCES[0]]) == 0
    found = capsys.readouterr().out
    assert len(wanted.alternatives) == 1
    for one in (wanted, *wanted.alternatives):
        assert f"{one.score:.4f}  {one.text}" in found


@pytest.mark.parametrize("wrong", [{"forced_eos_token_id": 99999}, {"bad_words_ids": [[-3]]}], ids=str)
@pytest.mark.parametrize("start", [None, 99999, -1])
def test_named_tokens_that_the_model_does_not_have_are_one_line(
    folder: Path, tmp_path: Path, wrong: dict[str, Any], start: int | None
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= wrong if start is None else {"decoder_start_token_id": start}
    (tmp_path / "copy" / "generation_config.json").write_text(json.dumps(settings))
    engine = vivace.load(tmp_path / "copy")
    with pytest.raises(ConfigError, match=r"(forced_eos_token_id|bad_words_ids|decoder_start_token_id) is -?\d+; this"):
        engine.generate(SOURCES[0], max_new_tokens=3)


def test_answers_beyond_learned_positions_are_refused_in_plain_transformers(tmp_path: Path) -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(make(tmp_path, "bart"))
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    with pytest.raises(CapacityError, match="the context holds 64"):
        model.generate(ids, num_beams=2, max_new_tokens=100, custom_generate=vivace.custom_generate)
    assert model.generate(ids, num_beams=2, max_new_tokens=8, custom_generate=vivace.custom_generate).shape[0] == 2
