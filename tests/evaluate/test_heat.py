"""transformers runs in its faster dtype, whichever that is here: by the rates of a heat, on every prompt of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.files import read_json
from vivace.evaluate import peers
from vivace.evaluate.benchmark import BenchmarkPrompt, Trial
from vivace.evaluate.peers import TransformersPeer, peer_systems

CPU = torch.device("cpu")
QUESTIONS = [BenchmarkPrompt(text, (3, 4, 5, index)) for index, text in enumerate(("a", "b", "c", "d"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16."""
    import transformers

    path = make_checkpoint(tmp_path_factory.mktemp("tiny"))
    transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    assert read_json(path / "config.json")["dtype"] == "bfloat16"
    return path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds that an answer takes by dtype, whatever it took; the first answer of a model takes a minute."""
    seconds: dict[str, float] = {}
    warm = set[int]()
    answer = TransformersPeer.answer

    def timed(self: TransformersPeer, batch: Sequence[BenchmarkPrompt]) -> Trial:
        took = seconds[str(self.model.dtype).removeprefix("torch.")] if id(self.model) in warm else 60.0
        warm.add(id(self.model))
        return replace(answer(self, batch), total_s=took)

    monkeypatch.setattr(TransformersPeer, "answer", timed)
    return seconds


@pytest.mark.parametrize("faster", ["bfloat16", "float32"])
def test_the_faster_dtype_runs(folder: Path, clock: dict[str, float], faster: str) -> None:
    clock |= {"bfloat16": 2.0, "float32": 2.0} | {faster: 1.0}
    names = ["transformers", "transformers-lookup"]
    found, heat = peer_systems(names, folder, QUESTIONS, max_new_tokens=5, device=CPU)
    assert heat is not None
    assert heat.dtype == faster
    slower = min(heat.rates, key=lambda name: heat.rates[name])
    assert set(heat.rates) == {"bfloat16", "float32"}
    assert slower != faster
    assert heat.rates[faster] == pytest.approx(2 * heat.rates[slower]), "the first answer, which warms up, is not timed"
    models: list[Any] = [peer.model for peer in found if isinstance(peer, TransformersPeer)]
    assert [str(model.dtype) for model in models] == [f"torch.{faster}"] * 2
    assert {str(weight.dtype) for weight in models[0].parameters()} == {f"torch.{faster}"}


def test_the_assistant_runs_in_the_same(folder: Path, clock: dict[str, float]) -> None:
    clock |= {"bfloat16": 1.0, "float32": 2.0}
    names = ["transformers-assisted"]
    (peer,), _ = peer_systems(names, folder, QUESTIONS, max_new_tokens=5, device=CPU, draft_folder=folder)
    assert isinstance(peer, TransformersPeer)
    assert peer.assistant.dtype == peer.model.dtype == torch.bfloat16


def test_a_checkpoint_in_float32_runs_in_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no other to choose from: bfloat16 would be another model."""
    loaded: list[str] = []
    load = peers._load
    monkeypatch.setattr(peers, "_load", lambda *args: loaded.append(args[1]) or load(*args))
    _, heat = peer_systems(["transformers"], make_checkpoint(tmp_path), QUESTIONS, max_new_tokens=5, device=CPU)
    assert heat is not None
    assert (heat.dtype, loaded) == ("float32", ["auto"])
