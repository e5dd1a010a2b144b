"""What takes seconds is said by commands and logged for callers of the library."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

import vivace
from tests.cli.conftest import Outcome
from tests.tiny_checkpoints import make_adapter, make_checkpoint
from vivace.core.cpu import quantized
from vivace.decode.shallow import DraftPlan
from vivace.engine import Engine
from vivace.kernels.choice import choose

Cli = Callable[..., Outcome]

pytestmark = pytest.mark.skipif(choose().body is None, reason="no native kernels here")
LINE = "weights of layers 0 to 1 to q4 for drafts"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model")


def opened(folder: Path) -> Engine:
    return vivace.load(folder, dtype="bfloat16", remember=False)


def test_a_command_says_that_weights_are_rounded(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "SLOW_WEIGHTS", 1)
    words = ("generate", "aka", "--model", folder, "--dtype", "bfloat16", "--max-new-tokens", "4", "--no-remember")
    outcome = cli(*words, "--method", "quantized")
    assert outcome.status == 0, outcome.err
    said = [line for line in outcome.err.splitlines() if line.endswith(LINE)]
    assert len(said) == 1
    assert said[0].startswith("rounding ")
    assert LINE not in cli(*words).err  # auto tries rounded weights only where a training has rounded them well
    assert LINE not in cli(*words, "--method", "quantized", "--quiet").err
    monkeypatch.setattr(quantized, "SLOW_WEIGHTS", 2**24)
    assert LINE not in cli(*words, "--method", "quantized").err
    assert logging.getLogger("vivace.core").handlers == []


def test_the_library_is_silent_and_logs(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(quantized, "SLOW_WEIGHTS", 1)
    caplog.set_level(logging.INFO, "vivace.core")
    engine = opened(folder)
    for _ in range(2):
        engine.generate("aka", method="quantized", max_new_tokens=4)
    said = [record.getMessage() for record in caplog.records if record.name == "vivace.core.cpu.quantized"]
    layer = engine.model.config
    count = (
        layer.num_layers
        * layer.width
        * ((layer.num_heads * 2 + layer.num_kv_heads * 2) * layer.head_dim + 3 * layer.ffn_width)
    )
    head = f"rounding {layer.vocab_size * layer.width:,} weights of the head to int8 for drafts"
    assert said == [f"rounding {count:,} {LINE}", head]  # once for the engine
    assert capsys.readouterr().err == ""


def test_auto_says_it_for_weights_that_draft_in_four_bits(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers below the exit of an adapter; layers of a file that ``train quantized`` has rounded are taken as they
    are."""
    monkeypatch.setattr(quantized, "SLOW_WEIGHTS", 1)
    adapter = make_adapter(folder / "adapters" / "multirate", folder, plan=DraftPlan((1, 1), weights="q4"))
    assert adapter.is_dir()
    words = ("generate", "aka", "--model", folder, "--dtype", "bfloat16", "--max-new-tokens", "4", "--no-remember")
    said = [line for line in cli(*words).err.splitlines() if line.startswith("rounding ")]
    assert len(said) == 2
    assert said[0].endswith("weights of layers 0 to 0 to q4 for drafts")
    assert said[1].endswith("weights of the head to int8 for drafts")
