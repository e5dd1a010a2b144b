"""Teacher forcing: what a batch of sources and texts teaches, and that a killed run goes on to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.train.killed_seq2seq import PAIRS, STEPS, source_rows, tiny_seq2seq, train
from vivace.checkpoint.tokenizer import Tokenizer
from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.errors import CapacityError
from vivace.train.resume import STATE, read_state
from vivace.train.source_data import SourceBatch, SourceRows
from vivace.train.teacher_forcing import TeacherForcing

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def batches(tokenizer: Tokenizer) -> list[SourceBatch]:
    return source_rows(tokenizer).batches(PAIRS, 300)


def naive_loss(model: Decoder, batch: SourceBatch, smoothing: float) -> float:
    """A loop over texts: each is read and written alone, one token after the other, as a session does it."""
    total, count = 0.0, 0
    for source, given, targets in zip(batch.sources, batch.given, batch.targets, strict=True):
        cache: KVCache = model.new_cache(1, 64)
        model.read_source(source.tolist(), 0, cache)
        for place, (token, target) in enumerate(zip(given.tolist(), targets.tolist(), strict=True)):
            if target < 0:
                break
            step = Step.at(cache, [0], [place])
            logits = model.head(model.run(model.embed(torch.tensor([token]), step), step))[0].double()
            cache.commit([0], [range(1)])
            surprise = torch.logsumexp(logits, 0) - logits
            total += float((1 - smoothing) * surprise[target] + smoothing * surprise.mean())
            count += 1
    return total / count


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_the_loop_over_texts(batches: list[SourceBatch], smoothing: float) -> None:
    model = tiny_seq2seq()
    assert {batch.sources.shape[0] for batch in batches} != {1}, "texts of several lengths beside each other"
    for batch in batches:
        with torch.no_grad():
            parts = list(TeacherForcing(model, smoothing=smoothing, rows=5).losses(model, batch))
            assert sum(float(part) for part, _ in parts) == pytest.approx(naive_loss(model, batch, smoothing), rel=1e-4)


def test_a_step_against_the_gradient_lowers_the_loss_by_as_much(batches: list[SourceBatch]) -> None:
    model, batch = tiny_seq2seq(), batches[0]
    objective = TeacherForcing(model, rows=7)
    weights = [p for group in objective.groups() for p in group["params"]]  # type: ignore[attr-defined]
    assert {id(p) for p in weights} == {id(p) for p in model.parameters()}, "everything learns, once"

    def loss() -> float:
        with torch.no_grad():
            return sum(float(part) for part, _ in objective.losses(model, batch))

    for part, _ in objective.losses(model, batch):
        part.backward()
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in weights)
    slope = sum(float(p.grad.pow(2).sum()) for p in weights if p.grad is not None)
    width = 1e-3 / slope
    with torch.no_grad():
        before = loss()
        for p in weights:
            assert p.grad is not None
            p.sub_(p.grad * width)
        assert before - loss() == pytest.approx(width * slope, rel=0.1)


def test_sources_are_not_padded_and_every_pair_comes_once(tokenizer: Tokenizer, batches: list[SourceBatch]) -> None:
    found = []
    for batch in batches:
        assert batch.num_elements <= 300
        for source, given, targets in zip(batch.sources, batch.given, batch.targets, strict=True):
            text = targets[targets >= 0].tolist()
            assert given.tolist()[: len(text)] == [1, *text[:-1]]
            assert text[-1] == tokenizer.eos_ids[0]
            found.append((tokenizer.decode(source.tolist()), tokenizer.decode(text)))
    assert sorted(found) == sorted(PAIRS)


def test_long_sources_are_cut_and_long_texts_left_out(tokenizer: Tokenizer) -> None:
    rows = SourceRows(tokenizer, 1, 4, 6).encode(
        [("a long source of words", "a b"), ("a", "far too long a text to be kept")]
    )
    assert [len(row.source) for row in rows] == [4]
    with pytest.raises(CapacityError, match="shortest of 1 texts"):
        SourceRows(tokenizer, 1, 4, 2).encode([("a", "a text of many words")])


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = Path(str(tokenizer.inner.name_or_path))
    whole = train(tmp_path / "whole", source)
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.train.killed_seq2seq", str(tmp_path / "killed"), str(source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(f"step {STEPS // 2} "):
                break
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    stopped = read_state(tmp_path / "killed" / STATE)["progress"]["step"]
    assert 0 < stopped < STEPS, "the kill came too late to prove anything"
    resumed = train(tmp_path / "killed", source)
    for (name, one), (_, other) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(one, other), name
