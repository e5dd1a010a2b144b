"""What is kept of a source, as users choose it: engine, command line, files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration

import vivace
import vivace.batch.run as runs
from tests.test_encoder_decoders import SEARCH, SOURCES, make
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.load import least_bytes, read_config
from vivace.cli.app import run
from vivace.engine.execution import Execution
from vivace.engine.sources import choose_sources
from vivace.errors import ConfigError, UnsupportedError


@pytest.fixture(scope="module", params=["t5", "bart"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama."""
    return make_checkpoint(tmp_path_factory.mktemp("llama"))


def test_texts_of_the_engine(folder: Path) -> None:
    shared, el = (vivace.load(folder, attention=attention) for attention in ("shared", "el"))
    for one, other in zip(shared.generate(SOURCES, **SEARCH), el.generate(SOURCES, **SEARCH), strict=True):
        assert other.text == one.text
        assert other.score == pytest.approx(one.score, rel=1e-5, abs=1e-5)
        assert [text.text for text in other.alternatives] == [text.text for text in one.alternatives]
    assert el.sources == vivace.load(folder, attention="el").sources
    assert vivace.load(folder).sources.name == "shared"


def test_generate_says_what_it_chose(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for attention in ("shared", "el", "auto"):
        command = ["generate", "--model", str(folder), "--attention", attention, "--num-beams", "3", "--json"]
        assert run([*command, "--max-new-tokens", "10", SOURCES[0]]) == 0
        shown = capsys.readouterr()
        texts.append(json.loads(shown.out)["results"][0]["text"])
        assert f"attention {'shared' if attention == 'auto' else attention}: " in shown.err
    assert texts[0] == texts[1] == texts[2] != ""


def answer_lines(folder: Path, out: Path, *words: str) -> int:
    asked = out.with_name("in.txt")
    asked.write_text("\n".join(SOURCES) + "\n")
    command = ["batch", str(asked), str(out), "--model", str(folder), "--workers", "0", "--max-new-tokens", "10"]
    return run([*command, *words])


def test_batch_answers_the_same(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for attention in ("shared", "el"):
        assert answer_lines(folder, tmp_path / f"{attention}.jsonl", "--attention", attention) == 0
    one, other = (
        [json.loads(line)["text"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("shared", "el")
    )
    assert one == other
    assert len(one) == len(SOURCES)
    assert answer_lines(folder, tmp_path / "auto.jsonl", "--memory", "64MiB") == 0
    assert "attention shared: keys and values of a source of" in capsys.readouterr().err


def test_a_batch_does_not_go_on_with_the_other(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = runs._BatchRun._keep

    def keep_and_stop(batch: runs._BatchRun) -> int:
        keep(batch)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(runs._BatchRun, "_keep", keep_and_stop)
        assert answer_lines(folder, tmp_path / "out.txt", "--attention", "shared") != 0
    assert answer_lines(folder, tmp_path / "out.txt", "--attention", "el") != 0
    assert "was begun with other settings" in capsys.readouterr().err
    assert answer_lines(folder, tmp_path / "out.txt", "--attention", "auto") == 0


def test_auto_takes_states_where_memory_is_too_little(folder: Path) -> None:
    plain, rounding = (Execution.of("auto", weights, "auto", "auto", ()) for weights in ("bf16", "int8"))
    least, raw = least_bytes(folder), read_config(folder)
    tight = choose_sources("auto", folder, raw, plain, limit=least + (64 << 10), kv="same")
    assert tight.name == "el"
    assert "are left beside the weights; states of the source take" in tight.reason
    wide = choose_sources("auto", folder, raw, plain, limit=least + (64 << 20), kv="same")
    assert (wide.name, "are left beside the weights" in wide.reason) == ("shared", True)
    assert choose_sources("auto", folder, raw, plain, limit=None, kv="same").reason == "no limit of memory was given"
    least = least_bytes(folder, weights="int8")
    rounded = choose_sources("auto", folder, raw, rounding, limit=least + (64 << 10), kv="same")
    assert rounded.name == "shared"
    assert "but EL-attention is not for this model: with int8 weights" in rounded.reason


def test_a_source_fits_that_did_not(tmp_path: Path) -> None:
    """Under one limit keys and values of a source are refused, and its states are read."""
    stacks = {f"{side}_{name}": value for side in ("encoder", "decoder")
              for name, value in (("layers", 8), ("attention_heads", 2), ("ffn_dim", 8))}  # fmt: skip
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "max_position_embeddings": 2048, "decoder_start_token_id": 1}
    BartForConditionalGeneration(BartConfig(**sizes, **stacks)).save_pretrained(tmp_path)
    prompt, room = [list(range(4, 60)) * 30], 1_500_000
    memory = least_bytes(tmp_path) + room
    with pytest.raises(vivace.VivaceError, match="of keys and values"):
        vivace.load(tmp_path, memory=memory, attention="shared").generate(prompt, max_new_tokens=4)
    engine = vivace.load(tmp_path, memory=memory)
    assert engine.sources.name == "el"
    found = engine.generate(prompt, max_new_tokens=4, ignore_eos=True)[0]
    assert found.token_ids == vivace.load(tmp_path).generate(prompt, max_new_tokens=4, ignore_eos=True)[0].token_ids
    assert engine.memory.most_taken_bytes < room


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"weights": "int8"}, "with int8 weights matrices of keys are stored in few bits row by row"),
        ({"kv": "int8"}, "kv int8 has keys and values in eight bits, and states are not rounded"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(folder: Path, asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"EL-attention is not for this model: {reason}"):
        vivace.load(folder, attention="el", **asked)


def test_a_model_without_an_encoder_is_refused(decoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedError, match=r"it has no encoder.*turned by their positions"):
        vivace.load(decoder, attention="el")
    assert run(["generate", "--model", str(decoder), "--attention", "el", "a"]) != 0
    assert "EL-attention is not for this model: it has no encoder" in capsys.readouterr().err
    assert vivace.load(decoder, attention="shared").sources.name == "shared"


def test_a_wrong_name_is_one_line(folder: Path) -> None:
    with pytest.raises(ConfigError, match="attention is 'eel'; did you mean 'el'"):
        vivace.load(folder, attention="eel")
