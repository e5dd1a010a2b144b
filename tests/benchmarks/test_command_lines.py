"""What is lacking on a command line is said before anything is measured, and nothing is lost behind it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import gguf_divergence, killed_training, prefill_growth, tradeoff
from tests.tiny_checkpoints import make_checkpoint


@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        (killed_training, ("--json", "j", "train", "chat"), "needs --out DIR"),
        (killed_training, ("--json", "j", "train", "chat", "--out"), "needs --out DIR"),
        (tradeoff, ("--judged", "j"), "--judged and --timed go together"),
        (prefill_growth, ("model", "source"), "measuring needs MODEL, SOURCE and --json"),
        (prefill_growth, (), "measuring needs MODEL, SOURCE and --json"),
    ],
)
def test_what_is_lacking_is_said(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: ModuleType,
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark", *words])
    with pytest.raises(SystemExit):
        module.main()
    assert said in capsys.readouterr().err


def test_a_text_too_short_for_its_pieces_is_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    gguf_divergence.require_pieces(model, "rain " * 40, 2, 4)
    with pytest.raises(SystemExit, match=r"model: the text has \d+ tokens, and 40 pieces of 256 are asked for"):
        gguf_divergence.require_pieces(model, "rain " * 40, 40, 256)
