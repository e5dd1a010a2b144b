"""``vivace batch --compare-stock``: the first answers of a file beside those of plain transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import vivace
from tests.test_encoder_decoders import SOURCES, make
from tests.tiny_checkpoints import make_checkpoint
from vivace.batch import stock as module
from vivace.cli.app import run
from vivace.errors import UnsupportedError

SEARCH = ["--num-beams", "3", "--length-penalty", "2.0", "--no-repeat-ngram-size", "2", "--max-new-tokens", "12"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("stock")
    found = {kind: make(root / kind, kind) for kind in ("t5", "bart")}
    make_checkpoint(root / "llama")
    return found | {"llama": root / "llama"}


def answered(folder: Path, tmp_path: Path, flags: list[str]) -> int:
    (tmp_path / "in.txt").write_text("\n".join(SOURCES) + "\n")
    command = ["batch", str(tmp_path / "in.txt"), str(tmp_path / "out.txt"), "--model", str(folder), *flags]
    return run([*command, "--dtype", "float32", "--workers", "0"])


@pytest.mark.parametrize("kind", ["t5", "bart", "llama"])
@pytest.mark.parametrize(
    "flags", [SEARCH, [*SEARCH, "--num-return-sequences", "2"], ["--max-new-tokens", "9"]], ids=len
)
def test_the_answers_are_those_of_transformers(
    folders: dict[str, Path], kind: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("\n".join(SOURCES) + "\n")
    out = tmp_path / "out.jsonl"
    command = ["batch", str(tmp_path / "in.txt"), str(out), "--model", str(folders[kind]), *flags, "--json"]
    assert run([*command, "--dtype", "float32", "--workers", "0", "--compare-stock", "3"]) == 0
    found = json.loads(capsys.readouterr().out)["stock"]
    assert (found["num_prompts"], found["different"], found["dtype"]) == (3, [], "float32")
    assert min(found["seconds"], found["stock_seconds"]) > 0


def test_a_difference_is_named_by_its_prompt(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = module.Stock._answer
    second = vivace.load(folders["t5"]).request(SOURCES[1], vivace.engine.Options()).source

    def other(self: module.Stock, request: Any) -> tuple[int, ...]:
        found = usual(self, request)
        return found[:-1] if request.source == second else found

    monkeypatch.setattr(module.Stock, "_answer", other)
    assert answered(folders["t5"], tmp_path, [*SEARCH, "--compare-stock", "9"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"the same tokens for {len(SOURCES) - 1} of {len(SOURCES)} prompts (others: prompt 2)" in said


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--temperature", "0.7"], "drawn by chance"),
        (["--compare-stock", "0"], "--compare-stock"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_is_answered(
    folders: dict[str, Path], tmp_path: Path, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answered(folders["llama"], tmp_path, ["--max-new-tokens", "4", "--compare-stock", "2", *flags]) != 0
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out.txt").exists()


def test_a_checkpoint_with_codes_is_not_compared(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folders["llama"], tmp_path / "copy")
    monkeypatch.setattr("vivace.evaluate.peers.holds_codes", lambda folder: True)
    assert answered(tmp_path / "copy", tmp_path, ["--max-new-tokens", "4", "--compare-stock", "2"]) != 0
    assert "plain safetensors" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "says"),
    [({"ignore_eos": True}, "ignore"), ({"stop_strings": "a"}, "stop strings"), ({"do_sample": True}, "by chance")],
)
def test_options_that_transformers_follows_otherwise_are_refused(
    folders: dict[str, Path], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnsupportedError, match=says):
        module.Stock(vivace.load(folders["llama"]), vivace.engine.Options.of(options))
