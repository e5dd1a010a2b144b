"""From pairs to an encoder-decoder checkpoint that plain transformers reads, and on from a base."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    M2M100Config,
    M2M100ForConditionalGeneration,
    NllbTokenizer,
)

import vivace
from tests.tiny_checkpoints import make_checkpoint
from tests.train.tiny import PAIRS
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.cli.app import run
from vivace.errors import ConfigError, MismatchError, UnsupportedError
from vivace.prompts import Prompt
from vivace.recipes import seq2seq_trainer
from vivace.recipes.kinds import recipe_named, recipe_of
from vivace.recipes.seq2seq import Seq2SeqRecipe, T5Shape
from vivace.recipes.seq2seq_trainer import train_seq2seq
from vivace.train.config import LoopConfig
from vivace.train.denoising import DenoisingConfig
from vivace.train.report import Lines
from vivace.train.source_data import SourceBatch, SourceRows

SHAPE = T5Shape(num_layers=2, num_decoder_layers=2, width=32, ffn_width=48, num_heads=4, head_dim=8, vocab_size=400)
RECIPE = Seq2SeqRecipe(
    kind="seq2seq",
    loop=LoopConfig(steps=30, warmup_steps=2, evaluate_steps=10, report_steps=10),
    shape=SHAPE,
    tokens_per_batch=512,
    longest_source=64,
    longest=48,
    held_back=2,
)
PROMPTS = [Prompt(prompt, (answer,)) for prompt, answer in PAIRS]
QUIET = Lines(lambda line: None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("t5") / "model"
    train_seq2seq(RECIPE, PROMPTS, out, QUIET)
    return out


def test_transformers_reads_it_and_writes_the_same(trained: Path) -> None:
    theirs = AutoModelForSeq2SeqLM.from_pretrained(trained, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(trained)
    engine = vivace.load(trained, dtype="float32")
    for source, _ in PAIRS[:3]:
        ids = tokenizer(source, return_tensors="pt")
        expected = theirs.generate(**ids, num_beams=3, max_new_tokens=12)[0].tolist()
        result = engine.generate(source, num_beams=3, max_new_tokens=12)[0]
        assert tokenizer.decode(expected, skip_special_tokens=True) == result.text
    assert theirs.config.decoder_start_token_id == 3


def test_it_goes_on_from_a_base_whose_loss_falls(trained: Path, tmp_path: Path) -> None:
    before = train_seq2seq(replace(RECIPE, loop=replace(RECIPE.loop, steps=2)), PROMPTS, tmp_path / "a", QUIET, trained)
    after = train_seq2seq(replace(RECIPE, base_rate=0.5), PROMPTS, tmp_path / "b", QUIET, trained)
    assert after.held_back["loss"] < before.held_back["loss"]
    assert json.loads((tmp_path / "b" / "config.json").read_text())["num_layers"] == 2
    assert (tmp_path / "b" / "tokenizer.json").read_bytes() == (trained / "tokenizer.json").read_bytes()


def test_no_source_is_both_held_back_and_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every source has three texts; one source stands in two rows."""
    prompts = [Prompt(f"source {i}", tuple(f"{word} {i}" for word in ("a", "b", "c"))) for i in range(20)]
    prompts.append(Prompt("source 3", ("d 3",)))
    seen: list[list[tuple[str, str]]] = []

    class Stopped(Exception):
        pass

    def batches(self: SourceRows, pairs: list[tuple[str, str]], *_: object) -> list[SourceBatch]:
        seen.append(pairs)
        return []

    def stop(recipe: object, rows: object, pairs: list[tuple[str, str]]) -> None:
        seen.append(pairs)
        raise Stopped

    monkeypatch.setattr(SourceRows, "batches", batches)
    monkeypatch.setattr(seq2seq_trainer, "_batches", stop)
    with pytest.raises(Stopped):
        train_seq2seq(replace(RECIPE, held_back=10), prompts, tmp_path, QUIET)
    held_back, trained_on = seen
    assert not {source for source, _ in held_back} & {source for source, _ in trained_on}
    assert 10 <= len(held_back) <= 13
    assert sorted(held_back + trained_on) == sorted((p.request, text) for p in prompts for text in p.references)


def test_what_does_not_fit_is_one_line(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a base"):
        train_seq2seq(replace(RECIPE, shape=None), PROMPTS, tmp_path, QUIET)
    with pytest.raises(ConfigError, match="is the base itself"):
        train_seq2seq(RECIPE, PROMPTS, trained, QUIET, trained)
    with pytest.raises(ConfigError, match="languages are for a base"):
        train_seq2seq(replace(RECIPE, languages=("eng_Latn", "fra_Latn")), PROMPTS, tmp_path, QUIET)
    with pytest.raises(ConfigError, match="knows no languages"):
        train_seq2seq(replace(RECIPE, languages=("eng_Latn", "fra_Latn")), PROMPTS, tmp_path, QUIET, trained)
    with pytest.raises(ConfigError, match="nothing to train on"):
        train_seq2seq(replace(RECIPE, held_back=len(PAIRS)), PROMPTS, tmp_path, QUIET)
    with pytest.raises(MismatchError):
        train_seq2seq(replace(RECIPE, smoothing=0.3), PROMPTS, trained, QUIET)
    others = [replace(prompt, references=("quite another",)) for prompt in PROMPTS]
    with pytest.raises(MismatchError, match="another recipe"):
        train_seq2seq(RECIPE, others, trained, QUIET)
    make_checkpoint(tmp_path / "llama")
    with pytest.raises(UnsupportedError, match="without an encoder"):
        train_seq2seq(RECIPE, PROMPTS, tmp_path / "x", QUIET, tmp_path / "llama")
    with pytest.raises(ConfigError, match="smoothing"):
        replace(RECIPE, smoothing=1.0)


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose tokenizer names languages, English in front of a source where nothing else is said."""
    folder = tmp_path_factory.mktemp("nllb")
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = NllbTokenizer(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[])
    tokenizer.save_pretrained(folder)
    stacks = {f"{side}_{name}": value for side in ("encoder", "decoder")
              for name, value in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
    ends = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = M2M100Config(vocab_size=len(tokenizer), d_model=32, max_position_embeddings=96, **stacks, **ends)
    M2M100ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def test_a_translator_keeps_the_languages_that_it_was_trained_on(translator: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, shape=None, languages=("fra_Latn", "deu_Latn"), loop=replace(RECIPE.loop, steps=2))
    recipe = replace(recipe, longest_source=96, longest=96)
    train_seq2seq(recipe, [Prompt("ab cd", ("ef",)), *PROMPTS], tmp_path, QUIET, translator)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    french, german = tokenizer.convert_tokens_to_ids(["fra_Latn", "deu_Latn"])
    engine = vivace.load(tmp_path)
    assert engine.tokenizer.encode("a b")[0] == french
    assert engine.generate("a b", max_new_tokens=3, num_beams=1)[0].token_ids[0] == german
    assert vivace.load(translator).tokenizer.encode("a b")[0] != french, "the base stays as it is"


def test_a_language_that_the_tokenizer_does_not_know_is_refused(translator: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, shape=None, languages=("fra_Latn", "french"))
    with pytest.raises(ConfigError, match="french"):
        train_seq2seq(recipe, PROMPTS, tmp_path, QUIET, translator)


def test_the_shipped_recipes_and_the_command(tmp_path: Path) -> None:
    for name in ("summary", "translate"):
        found = recipe_of(recipe_named(name))
        assert isinstance(found, Seq2SeqRecipe)
        assert found.shape is not None
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps({"prompt": a, "reference": b}) + "\n" for a, b in PAIRS))
    sizes = ["width=32", "ffn_width=48", "head_dim=8", "vocab_size=400", "num_layers=1", "num_decoder_layers=1"]
    given = [f"shape.{size}" for size in sizes] + ["loop.minutes=null", "loop.steps=3", "loop.warmup_steps=1"]
    command = ["train", "summary", *given, "held_back=2", "--data", str(data), "--out", str(tmp_path / "out")]
    assert run(command) == 0
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").config.num_layers == 1
    assert run(["train", "summary", "--data", str(data)]) != 0


def test_rows_that_are_left_out_or_cut_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A text that is too long, and a source of which the model sees only the beginning; transformers adds nothing."""
    prompts = [*PROMPTS, Prompt("a source", ("word " * 200,)), Prompt("long source " * 200, ("a text",))]
    notes: list[str] = []
    recipe = replace(RECIPE, loop=replace(RECIPE.loop, steps=3))
    train_seq2seq(recipe, prompts, tmp_path, Lines(notes.append))
    assert any(f"1 of {len(prompts)} rows have texts of more than 48 tokens" in note for note in notes)
    assert any(f"1 of {len(prompts)} sources have more than 64 tokens and are cut" in note for note in notes)
    assert capfd.readouterr().err == ""


def test_pieces_of_sources_are_learnt_from_in_the_first_epochs(trained: Path) -> None:
    recipe = replace(RECIPE, denoising=DenoisingConfig(share=2.0, epochs=2, words=5))
    rows = SourceRows(load_tokenizer(trained), 3, RECIPE.longest_source, RECIPE.longest)
    batches = seq2seq_trainer._batches(recipe, rows, PAIRS)
    counts = [sum(map(len, batches.epoch(number))) for number in range(3)]
    assert counts == [3 * len(PAIRS), 3 * len(PAIRS), len(PAIRS)]


def test_pieces_of_sources_come_by_the_command(tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps({"prompt": a, "reference": b}) + "\n" for a, b in PAIRS))
    command = ["train", "summary", "denoising.share=-1", "--data", str(data), "--out", str(tmp_path / "out")]
    assert run(command) == 2
    assert not (tmp_path / "out").exists()
